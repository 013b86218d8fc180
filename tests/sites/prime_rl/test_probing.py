"""Probes through real verifiers environments and tools, with scripts for a policy and its teachers."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tool_letters
from composer_prime.errors import TeacherError
from composer_prime.sites.embedded.batches import write_batch
from composer_prime.sites.embedded.environments import load_gates, load_sources, save_gates
from composer_prime.sites.embedded.rollouts import Group, RolloutPlayer
from composer_prime.sites.embedded.samples import make_samples
from composer_prime.teachers.candidates import EMPTY, Candidates
from composer_prime.teachers.carrier import unpack
from composer_prime.teachers.gate import MOST_FIRST, Gate
from composer_prime.teachers.served import ServedModel
from composer_prime.teachers.wire import ROUTES, NotSampled, Scores
from tests.servers.fake_inference import END_OF_TURN, FakePolicy, save_tokenizer, serving
from tests.sites.letters_site import letters_site
from tiny_policy.qwen3 import tiny_tokenizer

HINT = "\n\nHint: copy the letter"
TOKENIZER = tiny_tokenizer()


def call(tool: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def answers(prompt: str) -> list[str]:
    """What the tools have said so far."""
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)


def policy(prompt: str) -> str:
    """Opens the box, asks for the code of a letter that isn't there, and repeats what it is told."""
    told = answers(prompt)
    box = prompt.rpartition("Code in box ")[2][0]
    return call("open", box=box) if not told else call("code", letter="z") if len(told) == 1 else told[-1]


def right(prompt: str) -> str:
    """Opens the box, asks for its letter's code, and says it."""
    told = answers(prompt)
    box = prompt.rpartition("Code in box ")[2][0]
    return [call("open", box=box), call("code", letter=(told or ["z"])[0]), (told or [""])[-1]][len(told)]


@dataclass
class Script:
    """A teacher's part, and the prompts by which it and the policy were asked."""

    says: Callable[[str], str]
    prompts: list[str] = field(default_factory=list)
    policys: list[str] = field(default_factory=list)
    failure: TeacherError | None = None
    policy: Callable[[str], str] = field(default=lambda prompt: policy(prompt))
    has_scores: bool = False

    async def find(self, served: ServedModel) -> None:
        if not self.has_scores:
            raise TeacherError("it gives no scores")
        served.route = ROUTES[0]

    async def scores(self, served: ServedModel, token_ids: Sequence[int], k: int, num_ids: int) -> Scores:
        """Surely the letter h where a hint is read, and else u."""
        (letter,) = TOKENIZER.encode("h" if "Hint:" in TOKENIZER.decode(list(token_ids)) else "u")
        ids = np.full((len(token_ids), k), EMPTY, np.int32)
        ids[:, 0] = letter
        logprobs = np.where(ids == EMPTY, -np.inf, 0.0).astype(np.float32)
        return Scores([0.0] * len(token_ids), Candidates(ids, logprobs))

    async def sample(
        self, served: ServedModel, token_ids: Sequence[int], most: int, stops: Sequence[int], heat: float
    ) -> list[int]:
        if self.failure is not None:
            raise self.failure
        assert (most, heat) == (96, 1.0) and END_OF_TURN in stops
        self.prompts.append(str(TOKENIZER.decode(list(token_ids))))
        return [*TOKENIZER.encode(self.says(self.prompts[-1])), END_OF_TURN]

    def of_policy(self, prompt: str) -> str:
        self.policys.append(prompt)
        return self.policy(prompt)


Play = Callable[..., tuple[Group, Mapping[str, Gate]]]


@pytest.fixture
def play(tmp_path: Path, run_async: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Play:
    """`play(script, hints=..., replay=...)` plays eight rollouts of one box; the group, and the gates after it."""

    def run(
        script: Script,
        max_steps: int = 1000,
        max_turns: int | None = None,
        orchestrator: Mapping[str, Any] | None = None,
        groups: int = 1,
        **tables: Any,
    ) -> tuple[Group, Mapping[str, Gate]]:
        async def sample(served: ServedModel, *asked: Any) -> list[int]:
            return await script.sample(served, *asked)

        monkeypatch.setattr(ServedModel, "sample", sample)
        monkeypatch.setattr(ServedModel, "find", lambda served: script.find(served))
        if script.has_scores:
            monkeypatch.setattr(ServedModel, "scores", lambda *asked: script.scores(*asked))
        monkeypatch.setattr("composer_prime.teachers.pool.TeacherPool.check", lambda *args: _done())
        env = {"taskset": {"id": "tool-letters"}, "agent": {"max_turns": max_turns}}
        train = {"source": [{"name": "boxes", "env": env}], "sampling": {"max_completion_tokens": 96}}
        with serving(FakePolicy(reply=script.of_policy)) as port:
            settings = letters_site(
                tmp_path, port=port, model_dir=save_tokenizer(tmp_path / "model"),
                orchestrator={**(orchestrator or {}), "train": train}, max_steps=max_steps, seq_len=4096, **tables,
            )  # fmt: skip

            async def group() -> tuple[Group, Mapping[str, Gate]]:
                (source,) = load_sources(settings)
                url = f"http://127.0.0.1:{port}"
                async with RolloutPlayer([source], settings, base_url=url, model="policy") as player:
                    played = [await player.play_group(0, task, 8, 0) for task in range(groups)]
                    return played[0], getattr(source.env, "gates", {})

            return run_async(group())

    return run


async def _done() -> None:
    pass


def test_a_hinted_teacher_takes_over_at_the_turn_that_failed_and_the_policy_goes_on_without_the_hint(
    play: Play,
) -> None:
    script = Script(lambda prompt: call("code", letter=answers(prompt)[-1].partition("\n")[0]))
    group, gates = play(script, hints={})
    assert len(group.rollouts) == 8 and not group.failures
    assert {rollout.reward for rollout in group.rollouts} == {0.0}
    assert len(script.prompts) == 8 and gates["hints"].better == 1.0 and gates["hints"].weight == 1.0
    asked = {prompt for prompt in script.policys if len(answers(prompt)) == 1}
    assert {prompt.replace(HINT, "") for prompt in script.prompts} == asked
    assert all(prompt.count(f"{HINT}\n</tool_response>") == 1 for prompt in script.prompts)
    assert not any("Hint:" in prompt for prompt in script.policys)
    opened = [prompt for prompt in script.policys if not answers(prompt)]
    assert len(opened) == 8, "the turn before is said again as it was"
    assert sum(rollout.streams["teacher/hints/probes"] for rollout in group.rollouts) == 8


def test_a_hint_that_leads_nowhere_shuts_the_gate_where_the_policy_earns_rewards(play: Play) -> None:
    script = Script(lambda prompt: "no idea")
    _, gates = play(script, hints={})
    assert gates["hints"].weight == 1.0, "every reward is 0"
    gates["hints"].saw("another", 1.0)
    assert gates["hints"].weight == 0.0


def test_a_replay_teacher_plays_the_task_by_itself(play: Play) -> None:
    script = Script(right)
    teachers = [{"name": "big", "base_url": "http://127.0.0.1:1"}]
    group, gates = play(script, replay={"teachers": teachers})
    assert gates["big"].better == 1.0 and len(script.prompts) == 3 * 8
    assert len(script.policys) == 3 * 8, "the policy has no turn in a probe"
    assert group.rollouts[0].streams["teacher/big/weight"] in (0.0, 1.0)


def test_a_teacher_that_gives_no_text_is_not_asked_again(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(policy, failure=NotSampled("no token ids"))
    group, gates = play(script, replay={"teachers": [{"name": "big", "base_url": "http://127.0.0.1:1"}]})
    assert len(group.rollouts) == 8 and not gates["big"].can_play
    assert "teacher=big can't play: no token ids" in caplog.text


def test_a_probe_that_fails_is_no_evidence_and_no_failure_of_the_rollout(play: Play) -> None:
    script = Script(policy, failure=TeacherError("gone for now"))
    group, gates = play(script, hints={})
    assert len(group.rollouts) == 8 and not group.failures
    assert gates["hints"].num_probes == 8


def test_a_teacher_whose_probes_all_fail_can_not_be_compared_and_is_heard(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(policy, failure=TeacherError("gone for now"))
    _, gates = play(script, hints={})
    gates["hints"].saw("another", 1.0)
    assert gates["hints"].weight == 1.0 and "can't be compared, since its probes fail" in caplog.text
    assert not gates["hints"].may_probe()


def test_a_run_of_few_rollouts_plays_no_probe(play: Play) -> None:
    script = Script(policy)
    _, gates = play(script, max_steps=2, hints={})
    assert not script.prompts and gates["hints"].weight == 1.0 and gates["hints"].num_probes <= MOST_FIRST


def lazy(prompt: str) -> str:
    """Replies at once."""
    return "no idea"


def test_an_early_reply_and_a_rollout_out_of_turns_are_taught_by_hints_for_outcomes(play: Play) -> None:
    templates = {"reply": "\n\nHint: use the tools", "out_of_turns": "\n\nHint: reply now"}
    for does, max_turns, hint in ((lazy, None, "use the tools"), (policy, 1, "reply now")):
        script = Script(lambda prompt: "x")
        script.policy = does
        group, _ = play(script, hints={"templates": templates}, max_turns=max_turns)
        assert {rollout.streams["hints/error_sites"] for rollout in group.rollouts} == {1.0}
        assert len(script.prompts) == 8 and all(f"Hint: {hint}" in prompt for prompt in script.prompts)


def test_a_rollout_that_earned_the_most_has_no_outcome_to_be_hinted(play: Play) -> None:
    script = Script(right)
    script.policy = right
    group, _ = play(script, hints={"templates": {"reply": "\n\nHint: use the tools"}})
    assert {rollout.reward for rollout in group.rollouts} == {1.0}
    assert {rollout.streams["hints/error_sites"] for rollout in group.rollouts} == {0.0}


def test_a_task_says_itself_what_an_outcome_lacked(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tool_letters.ToolLettersTask, "outcome_hint", lambda self, trace: f"open box {self.data.box}", raising=False
    )
    script = Script(lambda prompt: "x")
    script.policy = lazy
    play(script, hints={})
    assert len(script.prompts) == 8 and all("\n\nHint: open box " in prompt for prompt in script.prompts)


def twice_wrong(prompt: str) -> str:
    """Asks for a box that isn't there, opens the right one, asks for a letter that isn't there, and replies."""
    told = answers(prompt)
    box = prompt.rpartition("Code in box ")[2][0]
    return [call("open", box="z"), call("open", box=box), call("code", letter="z"), "x"][len(told)]


def test_where_hints_are_shuffled_each_mistake_gets_the_hint_of_another(play: Play) -> None:
    script = Script(lambda prompt: "x")
    script.policy = twice_wrong
    play(script, hints={"shuffle": True})
    assert {len(answers(prompt)) for prompt in script.prompts} == {0, 2}
    assert all("Hint: copy the letter" in prompt for prompt in script.prompts if not answers(prompt))
    assert all("Hint: copy the box" in prompt for prompt in script.prompts if answers(prompt))


def test_turns_beside_a_taught_one_are_held_to_the_teacher_without_the_hint_and_mistakes_are_not(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer_prime.sites.prime_rl.stamping_env.leaks", lambda text, *told: "copy the box" in text)
    script = Script(policy, has_scores=True)
    script.policy = twice_wrong
    group, _ = play(script, max_steps=2, hints={})
    h, u = TOKENIZER.encode("hu")
    for rollout in group.rollouts:
        (branch,) = rollout.branches
        assert branch.candidates is not None
        (_, stream) = unpack(branch.candidates)
        turns: list[set[int]] = [set()]
        for token, told, is_sampled in zip(branch.token_ids, stream.ids[:, 0], branch.mask, strict=True):
            turns[-1] |= {int(told)} if is_sampled else set()
            turns += [set()] if is_sampled and token == END_OF_TURN else []
        wrong_box, opening, wrong_letter, reply, _ = turns
        assert (wrong_box, opening, wrong_letter, reply) == ({EMPTY}, {u}, {h}, {u})


def test_of_a_rollout_that_no_hint_is_for_nothing_is_held(play: Play) -> None:
    script = Script(policy, has_scores=True)
    script.policy = right
    group, _ = play(script, max_steps=2, hints={})
    assert all(branch.candidates is None for rollout in group.rollouts for branch in rollout.branches)


def test_hints_that_find_no_turn_in_twenty_steps_say_so(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(right)
    script.policy = lazy
    play(script, hints={}, orchestrator={"batch_size": 8, "group_size": 8}, groups=19)
    assert "hints found no turn" not in caplog.text
    play(script, hints={}, orchestrator={"batch_size": 8, "group_size": 8}, groups=21)
    assert caplog.text.count("hints found no turn to teach in 20 steps") == 1


def test_where_the_gate_never_opened_and_no_probe_was_played_the_trainer_is_handed_what_it_is_without_hints(
    play: Play, tmp_path: Path
) -> None:
    batches = []
    for hints in ({"hints": {}}, {}):
        script = Script(right)
        script.policy = right
        group, gates = play(script, **hints)
        assert all(gate.num_probes == 0 == gate.weight for gate in gates.values())
        samples = make_samples([group], temperature=1.0, filter_zero_advantages=False)
        folder = tmp_path / f"batches-{len(batches)}"
        write_batch(folder, 0, samples, 8)
        batches.append({file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()})
    assert batches[0] == batches[1] and len(samples) == 8


def test_a_resumed_site_goes_on_with_what_it_knows_of_its_teachers(play: Play, tmp_path: Path) -> None:
    script = Script(lambda prompt: call("code", letter=answers(prompt)[-1].partition("\n")[0]))
    _, gates = play(script, hints={})
    save_gates({"boxes/hints": gates["hints"]}, tmp_path / "gates.json")
    again = Gate("hints", 16_000)
    load_gates({"boxes/hints": again, "another/hints": Gate("hints")}, tmp_path / "gates.json")
    assert again.num_probes == 8
    again.saw(0, 0.0)
    assert again.weight == 1.0
    load_gates({"boxes/hints": again}, tmp_path / "none.json")
