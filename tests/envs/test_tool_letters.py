"""The environment with tools, as verifiers sees it: its boxes, its shards, what its tools answer, its rewards."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf

from composer_prime.config.teachers import HintKind
from composer_prime.hints.answers import find_error, find_hint
from tool_letters import BoxState, BoxTools, ToolLettersTask, ToolLettersTaskset


def tasks(**settings: Any) -> list[ToolLettersTask]:
    """The tasks that verifiers makes of the environment with these settings."""
    chosen = {"taskset": {"id": "tool-letters", **settings}, "agent": {"runtime": {"type": "subprocess"}}}
    return list(vf.load_environment(vf.resolve_env_config(chosen)).taskset)  # type: ignore[arg-type]


def boxes(**settings: Any) -> list[tuple[str, str, str]]:
    return [(task.data.box, task.data.letter, task.data.answer) for task in tasks(**settings)]


def tools_of(task: ToolLettersTask) -> BoxTools:
    """The task's toolset, set up for it."""
    (toolset,) = task.toolsets(task.config)
    assert isinstance(toolset, BoxTools)
    asyncio.run(toolset.setup_task(task.data))
    return toolset


def test_letter_and_code_stand_behind_the_tools_and_not_in_the_prompt() -> None:
    rows = tasks()
    assert [row.data.idx for row in rows] == list(range(128))
    for row in rows:
        assert row.data.prompt == f"Code in box {row.data.box}"
        assert len({row.data.box, row.data.letter, row.data.answer}) == 3
    row = rows[0]
    tools = tools_of(row)
    assert (tools.open(row.data.box), tools.code(row.data.letter)) == (row.data.letter, row.data.answer)


def test_only_the_code_is_rewarded_and_only_from_who_asked_for_it() -> None:
    (row,) = tasks(num_examples=1)
    answer = row.data.answer

    def reward(reply: str, has_code: bool) -> float:
        trace: Any = SimpleNamespace(last_reply=reply, state=BoxState(has_code=has_code))
        return asyncio.run(row.exact_match(trace))

    replies = (answer, row.data.letter, row.data.box, answer + answer, answer.upper(), "")
    assert [reward(reply, True) for reply in replies] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert reward(answer, False) == 0.0


def test_a_letter_that_was_guessed_has_no_code() -> None:
    (row,) = tasks(num_examples=1)
    tools = tools_of(row)
    assert find_error(tools.code(row.data.letter)) is not None and not tools.state.has_code
    tools.open(row.data.box)
    assert tools.code(row.data.letter) == row.data.answer and tools.state.has_code


@pytest.mark.parametrize("locks", [0, 1])
def test_a_call_that_fails_says_why_of_which_kind_and_what_to_do(locks: int) -> None:
    (row,) = tasks(num_examples=1, locks=locks)
    tools = tools_of(row)
    answers: dict[str, tuple[HintKind, str]] = {
        tools.open("nope"): ("bad_arguments", "copy the box"),
        tools.unlock("nope"): ("bad_arguments", "copy the box"),
        tools.code(row.data.letter): ("error", "call open first"),
    }
    if locks:
        answers[tools.open(row.data.box)] = ("error", "call unlock first")
    else:
        answers[tools.unlock(row.data.box)] = ("error", "call open first")
        tools.open(row.data.box)
        answers[tools.code("nope")] = ("bad_arguments", "copy the letter")
        tools.code(row.data.letter)
        answers[tools.code(row.data.answer)] = ("bad_arguments", "say the code")
    for answer, (kind, hint) in answers.items():
        found = find_error(answer)
        assert found is not None and (found[0], find_hint(answer)) == (kind, hint)
        assert json.loads(answer)["error_kind"] in ToolLettersTaskset.ERROR_KINDS


def test_a_box_opens_once_this_rollout_has_unlocked_it_often_enough() -> None:
    (row,) = tasks(num_examples=1, locks=2)
    tools, others = tools_of(row), tools_of(row)
    assert tools.unlock(row.data.box) == "locked"
    assert find_error(tools.open(row.data.box)) is not None
    assert tools.unlock(row.data.box) == "unlocked"
    assert tools.open(row.data.box) == row.data.letter
    assert find_error(others.open(row.data.box)) is not None


def test_boxes_are_a_function_of_the_seed_and_shards_share_none() -> None:
    assert boxes(seed=3) == boxes(seed=3)
    assert boxes(seed=3) != boxes(seed=4)
    shards = [boxes(shard=0, num_shards=2), boxes(shard=1, num_shards=2), boxes(shard=2, num_shards=3)]
    assert [len(shard) for shard in shards] == [128] * 3
    assert len(set().union(*shards)) == 3 * 128
    assert len(set(boxes(num_examples=720))) == 720


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"num_examples": 400, "num_shards": 2},
            r"2 x 400 = 800\) must not exceed the 720 boxes.*lower num_examples",
        ),
        ({"shard": 2, "num_shards": 2}, r"shard \(2\) must be smaller than num_shards \(2\)"),
    ],
)
def test_impossible_settings_are_refused_with_value_limit_and_remedy(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tasks(**settings)
