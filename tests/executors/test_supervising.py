"""What a supervisor decides about each site, from records, statuses and the time alone."""

from dataclasses import replace

import pytest

from composer_prime.errors import JobUnknown
from composer_prime.executors.base import JobState, JobStatus, Price
from composer_prime.launch.budget import Limits
from composer_prime.launch.decisions import PENDING_PATIENCE_S, Action, decide
from composer_prime.launch.pulses import STARTUP_PATIENCE, Pulse
from composer_prime.launch.records import Attempt, Ended, EndState, Stop, StopState
from tests.executors.launches import attempt_at

NOW, TICKS = 1_000_000.0, 5_000.0
LIMITS = Limits(max_restarts=2, hang_after_s=100.0)
RUNNING = JobStatus(JobState.RUNNING, started_at=NOW - 600)
PRICE = Price(1.0, "the test")


def attempt(site: str = "a", number: int = 1, end: EndState | None = None, code: int | None = None) -> Attempt:
    found = attempt_at(NOW - 600, site, number)
    if end is None:
        return replace(found, status=RUNNING)
    ended = Ended(state=end, exit_code=code, seconds=60.0, message="", ended_at=NOW - 1)
    return replace(found, ended=ended)


def stop(state: StopState, why: str = "") -> Stop:
    return Stop(state=state, why=why, by="there")


def decided(
    attempts: list[Attempt],
    status: JobStatus | None = None,
    pulse: Pulse | None = None,
    limits: Limits = LIMITS,
    later_s: float = 0.0,
) -> Action:
    if status is not None:
        attempts = [*attempts[:-1], replace(attempts[-1], status=status)]
    pulses = {} if pulse is None else {"a": pulse}
    return decide(["a"], attempts, pulses, limits, PRICE, wanted_s=3600, now=NOW + later_s, ticks=TICKS)["a"]


def test_a_site_that_nobody_started_is_started() -> None:
    assert decided([]) == Action("start", "first start", 1, 3600)


@pytest.mark.parametrize("status", [JobStatus(JobState.PENDING), RUNNING])
def test_a_site_under_way_is_left_alone(status: JobStatus) -> None:
    assert decided([attempt()], status) == Action("wait")


def test_a_platform_that_gave_no_answer_starts_nothing() -> None:
    silent = replace(attempt(), status=None, error=OSError("reset"))
    assert decided([silent]) == Action("wait")


def test_a_site_that_ended_rightly_is_never_started_again() -> None:
    assert decided([attempt(end="succeeded", code=0)]) == Action("done", "done")


@pytest.mark.parametrize("end", ["preempted", "timed-out", "failed", "hung", "lost"])
def test_whatever_else_ended_it_the_next_attempt_follows(end: EndState) -> None:
    action = decided([attempt(end=end, code=1 if end == "failed" else None)])
    assert action.do == "start" and (action.attempt, action.timeout_s) == (2, 3600) and end in action.why


def test_somebody_elses_cancel_is_respected() -> None:
    assert decided([attempt(end="cancelled")]) == Action("give up", "cancelled")


def test_what_only_a_person_can_mend_is_not_tried_again() -> None:
    action = decided([attempt(end="failed", code=2)])
    assert action.do == "give up" and "log" in action.why


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
    assert decided(attempts[:-1], limits=limits).do == "start"
    action = decided(attempts, limits=limits)
    assert action.do == "give up" and f"{option} is used up" in action.why


def test_the_budget_shortens_a_restart_and_then_refuses_it() -> None:
    spent = [attempt(end="preempted")]
    action = decided(spent, limits=Limits(2, max_usd=0.5 + 1 / 60))
    assert action.do == "start" and 1795 <= action.timeout_s <= 1800
    action = decided(spent, limits=Limits(2, max_usd=1 / 60))
    assert action.do in ("done", "give up") and "budget" in action.why


def test_a_site_that_waits_for_its_turn_shares_what_is_left() -> None:
    limits = Limits(max_usd=1.0)
    actions = decide(["a", "b"], [], {}, limits, PRICE, wanted_s=7200, now=NOW, ticks=TICKS)
    assert [action.timeout_s for action in actions.values() if action.do == "start"] == [1800, 1800]


def test_a_beat_that_stopped_is_a_hang_after_its_limit() -> None:
    fresh, stale = (Pulse(TICKS - 1000, TICKS - ago, "live") for ago in (99, 101))
    assert decided([attempt()], RUNNING, fresh) == Action("wait")
    action = decided([attempt()], RUNNING, stale)
    assert action.do == "end" and "101" in action.why


@pytest.mark.parametrize("state", ["", "done", "leaving"])
def test_a_replica_that_starts_or_ends_gets_more_patience(state: str) -> None:
    def silent(seconds: float) -> Pulse:
        return Pulse(TICKS - seconds) if not state else Pulse(TICKS - 9_000, TICKS - seconds, state)

    assert decided([attempt()], RUNNING, silent(100 * STARTUP_PATIENCE - 1)) == Action("wait")
    assert decided([attempt()], RUNNING, silent(100 * STARTUP_PATIENCE + 1)).do == "end"


def test_a_pending_job_does_not_hang() -> None:
    assert decided([attempt()], JobStatus(JobState.PENDING), Pulse(0.0)) == Action("wait")


def test_without_a_watchdog_nothing_hangs() -> None:
    assert decided([attempt()], RUNNING, Pulse(0.0), Limits(hang_after_s=None)) == Action("wait")


# --- what isn't known, and what was stopped --------------------------------------------------------------------------


def test_a_job_unknown_to_its_platform_is_waited_for_and_never_doubled() -> None:
    action = decided([replace(attempt(), status=None, error=JobUnknown("no job"))])
    assert action.do == "wait" and "unknown to its platform with this login (no job)" in action.why
    assert decided([attempt(end="lost")]).do == "start"


def test_what_was_stopped_and_may_run_is_ended_again() -> None:
    hung = replace(attempt(), stop=stop("hung", "no beat"))
    silent = replace(hung, status=None, error=OSError("reset"))
    assert decided([hung]) == Action("end", "no beat") == decided([silent])
    assert decided([replace(attempt(), stop=stop("cancelled"))]) == Action("end", "cancelled")
    assert decided([replace(attempt(end="hung"), stop=stop("hung"))]).do == "start"


def test_a_stopped_site_is_never_started() -> None:
    ends: tuple[EndState, ...] = ("preempted", "hung", "cancelled")
    for end in ends:
        assert decided([replace(attempt(end=end), stop=stop("cancelled"))]) == Action("give up", "cancelled")
    assert decided([replace(attempt(end="succeeded", code=0), stop=stop("cancelled"))]) == Action("done", "done")


@pytest.mark.parametrize("half", [None, JobStatus(JobState.PENDING, half_submitted=True)], ids=["not", "half"])
def test_what_was_only_meant_is_started_as_that_attempt_with_the_time_that_it_was_given(half: JobStatus | None) -> None:
    meant = replace(attempt(), job=None, status=half)
    action = decided([meant], limits=Limits(max_usd=1.0))
    assert action.do == "start" and (action.attempt, action.timeout_s) == (1, 3600)


@pytest.mark.parametrize("end", ["refused", "withdrawn"])
def test_an_attempt_that_was_no_run_is_followed_and_is_no_restart(end: EndState) -> None:
    action = decided([attempt(number=number, end=end) for number in (1, 2, 3)], limits=Limits(max_restarts=0))
    assert action.do == "start" and action.attempt == 4


def test_a_job_that_waits_long_for_a_machine_is_said_once_and_left_alone() -> None:
    pending = JobStatus(JobState.PENDING)
    assert decided([attempt()], pending, later_s=PENDING_PATIENCE_S - 600) == Action("wait")
    late, later = (decided([attempt()], pending, later_s=PENDING_PATIENCE_S + more) for more in (1, 5000))
    assert late.do == "wait" and "waits for a machine" in late.why and late == later


def test_other_sites_of_the_launch_spend_its_money_and_its_hours() -> None:
    others = [attempt("b"), attempt("c", end="preempted")]
    assert decided(others, limits=Limits(2, max_usd=1.0)) == Action(
        "give up", "first start, and the budget has no time left for another job"
    )
    action = decided(others, limits=Limits(2, max_hours=0.5))
    assert action.do == "start" and action.timeout_s == 1200
