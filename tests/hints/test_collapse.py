"""The alarm for hint teachers that move, and where a prompt has the hint."""

from pathlib import Path

import pytest
import verifiers.v1 as vf

from composer_prime.hints.collapse import LEAST, WINDOW, CollapseAlarm, hinted_prompt
from composer_prime.metrics import HINTS_TEACHER_HEEDS, MetricsTape

GOOD = [0.8] * WINDOW


def alarm_after(shares: list[float]) -> CollapseAlarm:
    alarm = CollapseAlarm()
    for share in shares:
        alarm.add(share)
    return alarm


def test_it_goes_off_when_the_mean_falls_below_a_third_of_its_best_and_says_what_to_do() -> None:
    num_bad = 2 * WINDOW // 3 + 1
    assert not alarm_after([*GOOD, *[0.0] * (num_bad - 1)]).has_gone_off
    alarm = alarm_after([*GOOD, *[0.0] * num_bad])
    assert alarm.has_gone_off
    mean = 0.8 * (WINDOW - num_bad) / WINDOW
    assert f"a share of {mean:.3f} over {WINDOW} steps, below a third of its best (0.800)" in str(alarm)
    assert 'begin anew with hints.teacher = "frozen"' in str(alarm)


def test_one_that_has_gone_off_stays_so() -> None:
    assert alarm_after([*GOOD, *[0.0] * WINDOW, *GOOD, *GOOD]).has_gone_off


@pytest.mark.parametrize(
    "shares",
    [
        [0.0] * 20,
        [0.9 * LEAST] * WINDOW + [0.0] * 20,
        [1.0] * (WINDOW - 1) + [0.4] * 20,
        [0.0, 1.0] * 20,
        [0.1 * step for step in range(10)],
    ],
)
def test_it_stays_silent_for_a_teacher_that_never_knew_rises_or_varies(shares: list[float]) -> None:
    assert not alarm_after(shares).has_gone_off


def test_a_tape_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    assert not CollapseAlarm.from_tape(path).has_gone_off
    with MetricsTape(path) as tape:
        for step, share in enumerate([*GOOD, *[0.0] * WINDOW]):
            tape.log(step, **{HINTS_TEACHER_HEEDS: share, "rollout/reward": 1.0})
            tape.log(step, **{"rollout/reward": 0.0})
    assert str(CollapseAlarm.from_tape(path)) == str(alarm_after([*GOOD, *[0.0] * WINDOW]))


def test_a_prompt_has_the_hint_at_its_end() -> None:
    assert hinted_prompt("Open it.", "\n\nHint: unlock") == "Open it.\n\nHint: unlock"
    said = [vf.SystemMessage(content="Be brief."), vf.UserMessage(content="Open it.")]
    first, last = hinted_prompt(said, "\n\nHint: unlock")
    assert (first.content, last.content, said[1].content) == ("Be brief.", "Open it.\n\nHint: unlock", "Open it.")
    assert hinted_prompt(None, "x") is None and hinted_prompt([], "x") is None
