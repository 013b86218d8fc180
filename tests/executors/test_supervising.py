"""What a supervisor decides about each site, from records, statuses and the time alone."""

from dataclasses import replace
from typing import Any

import pytest

from composer_prime.executors.base import JobState, JobStatus
from composer_prime.launch.budget import Limits
from composer_prime.launch.decisions import (
    PENDING_PATIENCE_S,
    STARTUP_PATIENCE,
    Action,
    Kill,
    Leave,
    Pulse,
    Standing,
    Start,
    Wait,
    decide,
)
from composer_prime.launch.records import Attempt, Ended, EndState, JobRecord, Started, Verdict

NOW, TICKS = 1_000_000.0, 5_000.0
LIMITS = Limits(max_restarts=2, hang_after_s=100.0)
RUNNING = JobStatus(JobState.RUNNING, started_at=NOW - 600)


def attempt(site: str = "a", number: int = 1, end: EndState | None = None, code: int | None = None) -> Attempt:
    record = JobRecord(
        site=site,
        attempt=number,
        on="local",
        spec="0" * 64,
        timeout_s=3600,
        usd_per_hour=1.0,
        secrets=(),
        account="here",
        created_at=NOW - 600,
        created_by="here",
    )
    started = Started(site=site, attempt=number, platform="local", id=f"{site}/{number}")
    ended = None
    if end is not None:
        ended = Ended(
            site=site,
            attempt=number,
            state=end,
            exit_code=code,
            seconds=60.0,
            usd=1 / 60,
            message="",
            ended_at=NOW - 1,
        )
    return Attempt(record, started, ended)


def decided(
    attempts: list[Attempt],
    status: JobStatus | None = None,
    pulse: Pulse | None = None,
    limits: Limits = LIMITS,
    later_s: float = 0.0,
    **found: Any,
) -> Action:
    statuses = {} if status is None else {("a", attempts[-1].number): status}
    (action,) = decide(
        ["a"],
        attempts,
        Standing(statuses, **found),
        {} if pulse is None else {"a": pulse},
        limits,
        wanted_s=3600,
        usd_per_hour=1.0,
        now=NOW + later_s,
        ticks=TICKS,
    )
    return action


def test_a_site_that_nobody_started_is_started() -> None:
    assert decided([]) == Start("a", 1, 3600, "first start")


@pytest.mark.parametrize("status", [JobStatus(JobState.PENDING), RUNNING])
def test_a_site_under_way_is_left_alone(status: JobStatus) -> None:
    assert decided([attempt()], status) == Wait("a")


def test_a_platform_that_gave_no_answer_starts_nothing() -> None:
    assert decided([attempt()]) == Wait("a")


def test_a_site_that_ended_rightly_is_never_started_again() -> None:
    assert decided([attempt(end="succeeded", code=0)]) == Leave("a", True, "done")
    assert decided([attempt()], JobStatus(JobState.SUCCEEDED, 0)) == Leave("a", True, "done")


@pytest.mark.parametrize("end", ["preempted", "timed-out", "failed", "hung", "lost"])
def test_whatever_else_ended_it_the_next_attempt_follows(end: EndState) -> None:
    action = decided([attempt(end=end, code=1 if end == "failed" else None)])
    assert isinstance(action, Start) and (action.attempt, action.timeout_s) == (2, 3600) and end in action.why


def test_a_live_end_counts_before_it_is_written_down() -> None:
    assert isinstance(decided([attempt()], JobStatus(JobState.PREEMPTED)), Start)


def test_somebody_elses_cancel_is_respected() -> None:
    assert decided([attempt(end="cancelled")]) == Leave("a", False, "cancelled")


def test_what_only_a_person_can_mend_is_not_tried_again() -> None:
    action = decided([attempt(end="failed", code=2)])
    assert isinstance(action, Leave) and not action.ok and "log" in action.why


@pytest.mark.parametrize(
    ("ends", "option"),
    [
        (("failed", "hung", "lost"), "--max-restarts (2)"),
        (("preempted", "preempted"), "--max-preemptions (1)"),
        (("timed-out",) * 4, "--max-timeouts (3)"),
    ],
)
def test_restarts_end_with_the_limit_of_their_kind_whatever_else_ended(ends: tuple[EndState, ...], option: str) -> None:
    limits = Limits(max_restarts=2, max_preemptions=1, max_timeouts=3)
    others: list[EndState] = [other for other in ("preempted", "timed-out", "failed") if other not in ends]
    attempts = [attempt(number=number, end=end) for number, end in enumerate((*others, *ends), start=1)]
    assert isinstance(decided(attempts[:-1], limits=limits), Start)
    action = decided(attempts, limits=limits)
    assert isinstance(action, Leave) and not action.ok and f"{option} is used up" in action.why


def test_the_budget_shortens_a_restart_and_then_refuses_it() -> None:
    spent = [attempt(end="preempted")]
    action = decided(spent, limits=Limits(2, max_usd=0.5 + 1 / 60))
    assert isinstance(action, Start) and 1795 <= action.timeout_s <= 1800
    action = decided(spent, limits=Limits(2, max_usd=1 / 60))
    assert isinstance(action, Leave) and "budget" in action.why


def test_a_site_that_waits_for_its_turn_shares_what_is_left() -> None:
    limits = Limits(max_usd=1.0)
    actions = decide(["a", "b"], [], Standing({}), {}, limits, wanted_s=7200, usd_per_hour=1.0, now=NOW, ticks=TICKS)
    assert [action.timeout_s for action in actions if isinstance(action, Start)] == [1800, 1800]


def test_a_beat_that_stopped_is_a_hang_after_its_limit() -> None:
    fresh, stale = (Pulse(TICKS - 1000, TICKS - ago, "live") for ago in (99, 101))
    assert decided([attempt()], RUNNING, fresh) == Wait("a")
    action = decided([attempt()], RUNNING, stale)
    assert isinstance(action, Kill) and action.attempt == 1 and "101" in action.why


@pytest.mark.parametrize("state", ["", "done", "leaving"])
def test_a_replica_that_starts_or_ends_gets_more_patience(state: str) -> None:
    def silent(seconds: float) -> Pulse:
        return Pulse(TICKS - seconds) if not state else Pulse(TICKS - 9_000, TICKS - seconds, state)

    assert decided([attempt()], RUNNING, silent(100 * STARTUP_PATIENCE - 1)) == Wait("a")
    assert isinstance(decided([attempt()], RUNNING, silent(100 * STARTUP_PATIENCE + 1)), Kill)


def test_a_pending_job_does_not_hang() -> None:
    assert decided([attempt()], JobStatus(JobState.PENDING), Pulse(0.0)) == Wait("a")


def test_without_a_watchdog_nothing_hangs() -> None:
    assert decided([attempt()], RUNNING, Pulse(0.0), Limits(hang_after_s=None)) == Wait("a")


# --- what isn't known, and what was stopped --------------------------------------------------------------------------


def test_a_job_unknown_to_its_platform_is_waited_for_and_never_doubled() -> None:
    action = decided([attempt()], unknown={("a", 1)})
    assert isinstance(action, Wait) and "unknown to its platform with this login" in action.why
    assert isinstance(decided([attempt(end="lost")]), Start)


def test_a_verdict_whose_end_nobody_confirmed_is_carried_out_again() -> None:
    verdict = Verdict(site="a", attempt=1, state="hung", why="no beat", at=NOW, by="there")
    condemned = replace(attempt(), verdict=verdict)
    assert decided([condemned], RUNNING) == Kill("a", 1, "no beat") == decided([condemned])
    assert isinstance(decided([replace(attempt(end="hung"), verdict=verdict)]), Start)


def test_a_stopped_site_is_watched_to_its_end_and_never_started() -> None:
    assert decided([attempt()], RUNNING, stopped={"a"}) == Wait("a")
    assert decided([attempt(end="preempted")], stopped={"a"}) == Leave("a", False, "cancelled")
    assert decided([attempt(end="succeeded", code=0)], stopped={"a"}) == Leave("a", True, "done")
    standing = Standing({}, stopped={"a"})
    assert decide(["a"], [], standing, {}, LIMITS, wanted_s=9, usd_per_hour=0.0, now=NOW, ticks=TICKS) == [
        Leave("a", False, "cancelled")
    ]


@pytest.mark.parametrize("end", ["refused", "withdrawn"])
def test_an_attempt_that_was_no_run_is_followed_when_it_was_mended_and_is_no_restart(end: EndState) -> None:
    attempts = [attempt(number=number, end=end) for number in (1, 2, 3)]
    action = decided(attempts)
    assert isinstance(action, Leave) and not action.ok and action.why.startswith(end)
    action = decided(attempts, mended={("a", 3)}, limits=Limits(max_restarts=0))
    assert isinstance(action, Start) and action.attempt == 4


def test_a_job_that_waits_long_for_a_machine_is_said_once_and_left_alone() -> None:
    pending = JobStatus(JobState.PENDING)
    assert decided([attempt()], pending, later_s=PENDING_PATIENCE_S - 600) == Wait("a")
    late, later = (decided([attempt()], pending, later_s=PENDING_PATIENCE_S + more) for more in (1, 5000))
    assert isinstance(late, Wait) and "waits for a machine" in late.why and late == later


def test_other_sites_of_the_launch_spend_its_money_and_its_hours() -> None:
    others = [attempt("b"), attempt("c", end="preempted")]
    assert decided(others, limits=Limits(2, max_usd=1.0)) == Leave(
        "a", False, "first start, and the budget has no time left for another job"
    )
    action = decided(others, limits=Limits(2, max_hours=0.5))
    assert isinstance(action, Start) and action.timeout_s == 1200
