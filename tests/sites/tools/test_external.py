"""MCP servers elsewhere: one connection serves all rollouts, and what a server does to one fails no other."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import asyncio
import threading

import pytest
import verifiers.v1 as vf
from mcp.server.mcpserver import Image
from mcp.shared.exceptions import MCPError

from composer_prime.errors import EnvError
from composer_prime.sites.embedded.rollouts import Group, RolloutPlayer
from composer_prime.sites.embedded.tools import external
from tests.sites.tools.conftest import Play
from tests.sites.tools.mcp_server import ServedTools
from tests.sites.tools.toolsets import answers, call, each_says, environment, own, says, turn_of

SCOPES = ("tools", "shared")
WAITING = 3
"""Rollouts that wait for an answer while another one fails."""


class Elsewhere(vf.Toolset[vf.ToolsetConfig]):
    """Tools that somebody else serves."""


class Tools:
    """What the server serves."""

    def __init__(self) -> None:
        self.waiting = threading.Barrier(WAITING + 1)
        self.go_on = threading.Event()

    async def shout(self, word: str) -> str:
        """Shout a word."""
        return word.upper()

    async def raise_error(self, word: str) -> str:
        """Raise an error."""
        raise ValueError(word)

    async def refuse(self) -> str:
        """Answer with an error of the protocol's."""
        raise MCPError(code=-32000, message="no licence")

    async def wait(self) -> str:
        """Answer when the test lets it."""
        await asyncio.to_thread(self.waiting.wait)
        await asyncio.to_thread(self.go_on.wait)
        return "waited"

    async def hang(self) -> str:
        """Never answer."""
        await asyncio.Event().wait()
        return "late"

    async def image(self) -> Image:
        """Answer with a picture."""
        return Image(data=b"\x89PNG", format="png")


def served(is_old: bool = False, tools: Tools | None = None) -> ServedTools:
    tools = tools or Tools()
    names = ("shout", "raise_error", "refuse", "wait", "hang", "image")
    return ServedTools(*(getattr(tools, name) for name in names), is_old=is_old)


def shout(word: str) -> str:
    return call("elsewhere_shout", {"word": word})


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_all_rollouts_share_one_connection(play: Play, scope: str, is_old: bool) -> None:
    with served(is_old) as server:
        exercise = environment(**{scope: own(Elsewhere, url=server.url)})
        group = play(exercise, each_says([shout(f"w{number}") for number in range(12)]), size=12)
        assert server.num_connections == 1
        assert server.asked["tools/call"] == 12
    assert group.failures == ()
    assert sorted(answers(rollout)[0] for rollout in group.rollouts) == sorted(f"W{number}" for number in range(12))


def test_errors_of_its_tools_are_read_by_the_policy(play: Play) -> None:
    turns = call("elsewhere_raise_error", {"word": "gone"}), call("elsewhere_shout", {"what": "x"})
    with served() as server:
        group = play(environment(own(Elsewhere, url=server.url)), says(*turns, "done"))
    assert group.failures == ()
    raised, refused = answers(group.rollouts[0])
    # mcp 2.2 keeps the text of what a tool raised from clients; a server's own toolset wraps it (verifiers 0.4.1).
    assert raised.removesuffix(": gone") == "Error executing tool raise_error"
    assert refused.startswith("Error executing tool shout: 1 validation error for shoutArguments")
    assert group.rollouts[0].streams["tools/errors"] == 2.0


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_server_that_goes_away_fails_rollouts_until_it_is_back(play: Play, scope: str, is_old: bool) -> None:
    with served(is_old) as server:

        async def scenario(player: RolloutPlayer) -> list[Group]:
            groups = [await player.play_group(0, 0, 3, 7)]
            await asyncio.to_thread(server.stop)
            groups.append(await player.play_group(0, 0, 3, 7))
            await asyncio.to_thread(server.start)
            return [*groups, await player.play_group(0, 0, 3, 7)]

        exercise = environment(**{scope: own(Elsewhere, url=server.url)})
        before, meanwhile, after = play(exercise, says(shout("hi"), "done"), scenario=scenario)
        assert server.num_connections == 2
    assert before.failures == () == after.failures
    assert [answers(rollout) for rollout in before.rollouts + after.rollouts] == [["HI"]] * 6
    assert meanwhile.rollouts == ()
    assert all(failure.startswith("ToolDied: ") and server.url in failure for failure in meanwhile.failures)


def test_a_server_that_goes_away_in_the_middle_of_a_rollout_fails_it(play: Play) -> None:
    with served() as server:

        def reply(prompt: str) -> str:
            if turn_of(prompt) == 1:
                server.stop()
            return shout("hi")

        (failure,) = play(environment(own(Elsewhere, url=server.url)), reply).failures
    assert failure.startswith(f"ToolDied: tool shout: MCP server {server.url} ")


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("hang", "ToolTimeout: tool hang: MCP server {url} gave no answer within harness.tool_timeout (2 s)"),
        ("image", "ToolGarbage: tool image answered with image: the policy reads text alone"),
    ],
)
def test_a_tool_elsewhere_that_gives_no_answer_fails_its_rollout_and_no_other(
    play: Play, tool: str, reason: str
) -> None:
    firsts = [call(f"elsewhere_{tool}"), *[shout("hi")] * 3]
    waiting = {"harness": {"tool_timeout": 2.0}}
    with served() as server:
        group = play(environment(own(Elsewhere, url=server.url)), each_says(firsts), size=4, agent=waiting)
        assert server.num_connections == 1
    assert group.failures == (reason.format(url=server.url),)
    assert [answers(rollout) for rollout in group.rollouts] == [["HI"]] * 3


def test_a_call_that_the_server_refuses_fails_its_rollout_and_no_call_in_flight(play: Play) -> None:
    tools = Tools()

    async def scenario(player: RolloutPlayer) -> tuple[Group, Group]:
        waiting = asyncio.create_task(player.play_group(0, 0, WAITING, 7))
        await asyncio.to_thread(tools.waiting.wait)
        refused = await player.play_group(0, 0, 1, 7)
        tools.go_on.set()
        return await waiting, refused

    firsts = [*[call("elsewhere_wait")] * WAITING, call("elsewhere_refuse")]
    with served(tools=tools) as server:
        exercise = environment(own(Elsewhere, url=server.url))
        waited, refused = play(exercise, each_says(firsts), scenario=scenario)
    (failure,) = refused.failures
    assert failure.startswith("ToolDied: tool refuse: ") and "no licence" in failure
    assert waited.failures == ()
    assert [answers(rollout) for rollout in waited.rollouts] == [["waited"]] * WAITING


def test_a_server_that_lets_nobody_in_any_more_fails_each_rollout(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:

        async def scenario(player: RolloutPlayer) -> list[Group]:
            await asyncio.to_thread(server.stop)
            await player.play_group(0, 0, 1, 7)  # finds nobody: the next one must connect anew
            monkeypatch.setattr(external, "CONNECT_TIMEOUT_S", 1.0)
            server.mute |= {"server/discover", "initialize"}
            await asyncio.to_thread(server.start)
            first = asyncio.create_task(player.play_group(0, 0, 2, 7))
            await asyncio.to_thread(server.was_mute.wait)
            return await asyncio.gather(first, player.play_group(0, 0, 2, 7))

        exercise = environment(own(Elsewhere, url=server.url))
        groups = play(exercise, says(shout("hi"), "done"), scenario=scenario)
    for group in groups:
        assert len(group.failures) == 2
        assert all(failure.startswith("ToolDied: ") and "can't be reached" in failure for failure in group.failures)


def test_two_servers_of_one_name_are_refused_before_the_first_step(play: Play) -> None:
    with served() as server:
        exercise = environment(own(Elsewhere, Elsewhere, url=server.url))
        with pytest.raises(EnvError, match=r"two tool servers are called elsewhere: give one another TOOL_PREFIX"):
            play(exercise, says("done"))
