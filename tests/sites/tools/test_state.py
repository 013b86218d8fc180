"""What tools remember: the rollout's state, which its reward sees, and nothing of other rollouts; then all is gone."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import itertools
import os
import threading
from collections import Counter

import psutil
import pytest
import verifiers.v1 as vf

from composer_prime.sites.embedded.rollouts import RolloutPlayer
from tests.sites.tools.conftest import Play
from tests.sites.tools.toolsets import answers, call, each_says, environment, own, says


class Purse(vf.State):
    """What rollouts are rewarded for."""

    coins: list[int] = []  # noqa: RUF012 - pydantic copies it


class Bank(vf.Toolset[vf.ToolsetConfig, Purse]):
    """Reads and writes the rollout's state."""

    @vf.tool
    def save(self, coin: int) -> list[int]:
        """Put a coin into the purse."""
        self.state.coins.append(coin)
        return self.state.coins

    @vf.tool
    async def replace(self, coin: int) -> int:
        """Exchange all coins for one."""
        before, self.state.coins = len(self.state.coins), [coin]
        return before

    @vf.tool
    def spill(self, coin: int) -> str:
        """Lose the coins, and fail."""
        self.state.coins = [coin]
        raise ValueError("spilt")


class Watch(vf.Toolset[vf.ToolsetConfig, Purse]):
    """Another one that sees the same state."""

    @vf.tool
    def count(self) -> int:
        """How many coins there are."""
        return len(self.state.coins)


def total(trace: vf.Trace) -> float:
    return float(sum(trace.state.coins))


def test_tools_read_and_write_the_state_that_the_reward_sees(play: Play) -> None:
    turns = [
        call("bank_save", {"coin": 2}) + "\n" + call("bank_save", {"coin": 3}),
        call("watch_count"),
        call("bank_replace", {"coin": 7}),
        call("bank_save", {"coin": 1}),
    ]
    group = play(environment(own(Bank, Watch), state=Purse, reward=total), says(*turns, "done"), size=2)
    assert group.failures == ()
    for rollout in group.rollouts:
        assert answers(rollout) == ["2", "2\n3", "2", "2", "7\n1"]
        assert rollout.reward == 8.0


def test_what_a_call_that_fails_did_to_the_state_is_undone(play: Play) -> None:
    turns = call("bank_save", {"coin": 2}), call("bank_spill", {"coin": 9}), "done"
    group = play(environment(own(Bank), state=Purse, reward=total), says(*turns))
    assert [rollout.reward for rollout in group.rollouts] == [2.0]


def test_tools_shared_by_a_taskset_see_the_state_of_the_rollout_that_calls(play: Play) -> None:
    firsts = [call("bank_save", {"coin": 2 * number}) for number in range(4)]
    group = play(environment(shared=own(Bank), state=Purse, reward=total), each_says(firsts), size=4)
    assert group.failures == ()
    assert sorted(rollout.reward for rollout in group.rollouts) == [0.0, 2.0, 4.0, 6.0]


_numbers = itertools.count()


class Numbered(vf.Toolset[vf.ToolsetConfig]):
    """Says which instance it is, and what it was called with before."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        self.number = next(_numbers)
        self.seen: list[str] = []

    async def setup_task(self, task: vf.TaskData) -> None:
        self.prompt = task.prompt

    @vf.tool
    def who(self, name: str) -> list[str]:
        """Say who this is."""
        self.seen.append(name)
        return [str(self.number), str(self.prompt), *self.seen]

    @vf.tool
    def process(self) -> int:
        """Say in which process this is."""
        return os.getpid()


def test_each_rollout_has_an_instance_of_its_own_that_knows_its_task(play: Play) -> None:
    firsts = [call("who", {"name": str(number)}) for number in range(6)]
    group = play(environment(own(Numbered)), each_says(firsts), size=6)
    told = [answer.split("\n") for rollout in group.rollouts for answer in answers(rollout)]
    assert len({number for number, *_ in told}) == 6
    assert sorted(seen for _, prompt, *seen in told) == [[str(number)] for number in range(6)]
    assert {prompt for _, prompt, *_ in told} == {"Go"}


def test_shared_tools_are_one_instance_for_all_rollouts_and_know_no_task(play: Play) -> None:
    class Shared(Numbered):
        async def setup(self) -> None:
            await super().setup()
            self.prompt = "none"

    firsts = [call("who", {"name": str(number)}) for number in range(6)]
    group = play(environment(shared=own(Shared)), each_says(firsts), size=6)
    told = [answer.split("\n") for rollout in group.rollouts for answer in answers(rollout)]
    assert len({number for number, *_ in told}) == 1
    assert {prompt for _, prompt, *_ in told} == {"none"}
    assert sorted(len(seen) for _, _, *seen in told) == [1, 2, 3, 4, 5, 6]


def left() -> tuple[Counter[str], list[psutil.Process], int]:
    """Threads, but for those of the event loop's pool, child processes, and open descriptors."""
    names = (thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_"))
    this = psutil.Process()
    return Counter(names), this.children(recursive=True), this.num_fds()


@pytest.mark.parametrize("scope", ["tools", "shared"])
def test_nothing_is_left_of_tools_when_the_player_is_left(play: Play, scope: str) -> None:
    seen: list[Counter[str]] = []

    class Witness(Numbered):
        @vf.tool
        def look(self) -> str:
            """Count threads."""
            seen.append(left()[0])
            return "seen"

    both = call("look") + "\n" + call("who", {"name": "x"}) + "\n" + call("process")
    exercise = environment(**{scope: own(Witness)})

    def once() -> None:
        group = play(exercise, says(both, call("unknown"), "done"), size=4)
        assert group.failures == ()
        assert {answers(rollout)[2] for rollout in group.rollouts} == {str(os.getpid())}

    once()
    threads, children, descriptors = left()
    once()
    more_threads, more_children, more_descriptors = left()
    assert all(seen_then["toolsets"] >= 1 for seen_then in seen), "a thread served them"
    assert not {"toolsets", "tool"} & {*threads, *more_threads}
    assert set(more_children) <= set(children) and more_descriptors <= descriptors


def test_what_a_toolset_holds_open_is_closed_with_its_rollout(play: Play) -> None:
    held: list[int] = []
    happened: list[str] = []

    class Holder(vf.Toolset[vf.ToolsetConfig]):
        """Holds something for as long as it is served."""

        TOOL_PREFIX = None

        async def setup(self) -> None:
            held.append(1)
            self._exit_stack.callback(held.pop)

        @vf.tool
        def number(self) -> int:
            """How many are held."""
            return len(held)

    async def scenario(player: RolloutPlayer) -> None:
        for _ in range(3):
            group = await player.play_group(0, 0, 1, 7)
            happened.extend(answers(group.rollouts[0]))
            assert held == []

    play(environment(own(Holder)), says(call("number"), "done"), scenario=scenario)
    assert happened == ["1"] * 3
