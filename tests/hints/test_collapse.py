"""The alarm for hint teachers that move, and where a prompt has the hint."""

import random
from pathlib import Path

import pytest
import verifiers.v1 as vf

from composer_prime.hints.collapse import LEAST, LOST, NUM_PROBES, WINDOW, CollapseAlarm, hinted_prompt
from composer_prime.metrics import HINTS_PROBES, HINTS_TEACHER_FIRST_CALL, MetricsTape, read_tape

STEPS = WINDOW // NUM_PROBES
GOOD = [NUM_PROBES] * STEPS
NUM_BAD = int((1 - LOST) * STEPS) + 1
"""Steps without a success after which the share is too low."""


def alarm_after(succeeded: list[int], count: int = NUM_PROBES) -> CollapseAlarm:
    alarm = CollapseAlarm()
    for each in succeeded:
        alarm.add(each, count)
    return alarm


def test_it_goes_off_when_the_share_falls_below_a_fifth_of_its_best_and_says_what_to_do() -> None:
    assert not alarm_after([*GOOD, *[0] * (NUM_BAD - 1)]).has_gone_off
    alarm = alarm_after([*GOOD, *[0] * NUM_BAD])
    assert alarm.has_gone_off
    assert f"a share of {1 - NUM_BAD / STEPS:.3f} began with a call that succeeded, below a fifth" in str(alarm)
    assert "of its best (1.000)" in str(alarm)
    assert 'begin anew with hints.teacher = "frozen"' in str(alarm)


def test_one_that_has_gone_off_stays_so() -> None:
    assert alarm_after([*GOOD, *[0] * STEPS, *GOOD, *GOOD]).has_gone_off


@pytest.mark.parametrize("count", [1, 4, NUM_PROBES])
@pytest.mark.parametrize("probability", [0.05, 0.2, 0.3, 0.5, 0.9])
def test_a_teacher_that_stays_as_it_is_sets_it_off_in_less_than_one_run_of_a_hundred(
    probability: float, count: int
) -> None:
    dice = random.Random(0)
    runs = [
        alarm_after([sum(dice.random() < probability for _ in range(count)) for _ in range(200)], count)
        for _ in range(200)
    ]
    assert sum(alarm.has_gone_off for alarm in runs) <= 2


def test_it_stays_silent_for_a_teacher_that_never_knew() -> None:
    little = int(LEAST * NUM_PROBES) - 1
    assert not alarm_after([*[little] * STEPS, *[0] * 20]).has_gone_off


def test_a_tape_gives_it_back_and_a_step_that_was_played_again_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    assert not CollapseAlarm.from_tape(read_tape(path)).has_gone_off
    fallen = [*GOOD, *[0] * NUM_BAD]
    with MetricsTape(path) as tape:
        for step, each in enumerate(fallen[:-1]):
            for _ in range(2):
                tape.log(step, **{HINTS_TEACHER_FIRST_CALL: each / NUM_PROBES, HINTS_PROBES: NUM_PROBES})
        tape.log(len(fallen), **{"rollout/reward": 0.0})
        assert not CollapseAlarm.from_tape(read_tape(path)).has_gone_off
        tape.log(len(fallen), **{HINTS_TEACHER_FIRST_CALL: 0.0, HINTS_PROBES: NUM_PROBES})
    assert str(CollapseAlarm.from_tape(read_tape(path))) == str(alarm_after(fallen))


def test_a_prompt_has_the_hint_at_its_end() -> None:
    assert hinted_prompt("Open it.", "\n\nHint: unlock") == "Open it.\n\nHint: unlock"
    said = [vf.SystemMessage(content="Be brief."), vf.UserMessage(content="Open it.")]
    first, last = hinted_prompt(said, "\n\nHint: unlock")
    assert (first.content, last.content, said[1].content) == ("Be brief.", "Open it.\n\nHint: unlock", "Open it.")
    assert hinted_prompt(None, "x") is None and hinted_prompt([], "x") is None
