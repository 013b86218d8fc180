"""What a supervisor decides about each site, from records, statuses and the time alone."""

from dataclasses import replace

import pytest

from composer_prime.errors import JobUnknown
from composer_prime.executors.base import JobState, JobStatus, Price
from composer_prime.launch.budget import Limits
from composer_prime.launch.decisions import PENDING_PATIENCE_S, STARTUP_PATIENCE, Action, Pulse, decide
from composer_prime.launch.records import Attempt, Ended, EndState, Stop, StopState
from tests.executors.launches import attempt_at

NOW, TICKS = 1_000_000.0, 5_000.0
LIMITS = Limits(max_restarts=2, hang_after_s=100.0)
RUNNING, PENDING = JobStatus(JobState.RUNNING, started_at=NOW - 600), JobStatus(JobState.PENDING)
PRICE = Price(1.0, "the test")


def attempt(site: str = "a", number: int = 1, end: EndState | None = None, code: int | None = None) -> Attempt:
    found = attempt_at(NOW - 600, site, number)
    if end is None:
        return replace(found, status=RUNNING)
    ended = Ended(state=end, exit_code=code, seconds=60.0, message="", ended_at=NOW - 1)
    return replace(found, ended=ended)


def stopped(attempt: Attempt, state: StopState, why: str = "") -> Attempt:
    return replace(attempt, stop=Stop(state=state, why=why, by="there"))


def decided(*attempts: Attempt, pulse: Pulse | None = None, limits: Limits = LIMITS, later_s: float = 0.0) -> Action:
    pulses = {} if pulse is None else {"a": pulse}
    return decide(["a"], attempts, pulses, limits, PRICE, wanted_s=3600, now=NOW + later_s, ticks=TICKS)["a"]


SILENT = replace(attempt(), status=None, error=OSError("reset"))


@pytest.mark.parametrize(
    ("attempts", "action"),
    [
        ([], Action("start", "first start", 1, 3600)),
        ([attempt()], Action("wait")),
        ([replace(attempt(), status=PENDING)], Action("wait")),
        ([SILENT], Action("wait")),
        ([attempt(end="succeeded", code=0)], Action("done", "done")),
        ([attempt(end="cancelled")], Action("give up", "cancelled")),
        ([attempt(end="failed", code=2)], Action("give up", "exit code 2: its log says what to mend")),
        ([stopped(attempt(), "hung", "no beat")], Action("end", "no beat")),
        ([stopped(SILENT, "hung", "no beat")], Action("end", "no beat")),
        ([stopped(attempt(), "cancelled")], Action("end", "cancelled")),
        *(
            ([stopped(attempt(end=end), "cancelled")], Action("give up", "cancelled"))
            for end in ("preempted", "hung", "cancelled")
        ),
        ([stopped(attempt(end="succeeded", code=0), "cancelled")], Action("done", "done")),
        *(([attempt(end=end)], Action("start", end, 2, 3600)) for end in ("preempted", "timed-out", "hung", "lost")),
        ([attempt(end="failed", code=1)], Action("start", "failed, exit code 1", 2, 3600)),
        ([stopped(attempt(end="hung"), "hung")], Action("start", "hung", 2, 3600)),
    ],
)
def test_a_site_is_started_after_every_end_but_a_right_one_a_cancel_and_what_only_a_person_can_mend(
    attempts: list[Attempt], action: Action
) -> None:
    assert decided(*attempts) == action


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
    assert decided(*attempts[:-1], limits=limits).do == "start"
    action = decided(*attempts, limits=limits)
    assert action.do == "give up" and f"{option} is used up" in action.why


def test_the_budget_shortens_a_restart_and_then_refuses_it() -> None:
    spent = attempt(end="preempted")
    action = decided(spent, limits=Limits(2, max_usd=0.5 + 1 / 60))
    assert action.do == "start" and 1795 <= action.timeout_s <= 1800
    action = decided(spent, limits=Limits(2, max_usd=1 / 60))
    assert action.do == "give up" and "budget" in action.why


def test_all_sites_of_a_launch_share_its_money_and_its_hours() -> None:
    limits = Limits(max_usd=1.0)
    actions = decide(["a", "b"], [], {}, limits, PRICE, wanted_s=7200, now=NOW, ticks=TICKS)
    assert [action.timeout_s for action in actions.values() if action.do == "start"] == [1800, 1800]
    others = attempt("b"), attempt("c", end="preempted")
    assert decided(*others, limits=limits).why == "first start, and the budget has no time left for another job"
    assert decided(*others, limits=Limits(2, max_hours=0.5)).timeout_s == 1200


@pytest.mark.parametrize(
    ("pulse", "most_s"),
    [
        (lambda silent_s: Pulse(TICKS - 1000, TICKS - silent_s, "live"), 100),
        (lambda silent_s: Pulse(TICKS - silent_s), 100 * STARTUP_PATIENCE),
        (lambda silent_s: Pulse(TICKS - 9_000, TICKS - silent_s, "done"), 100 * STARTUP_PATIENCE),
        (lambda silent_s: Pulse(TICKS - 9_000, TICKS - silent_s, "leaving"), 100 * STARTUP_PATIENCE),
    ],
    ids=["live", "starts", "done", "leaving"],
)
def test_a_beat_that_stopped_is_a_hang_after_its_limit_and_later_where_a_replica_starts_or_ends(pulse, most_s) -> None:
    assert decided(attempt(), pulse=pulse(most_s - 1)) == Action("wait")
    action = decided(attempt(), pulse=pulse(most_s + 1))
    assert action.do == "end" and str(most_s + 1) in action.why
    assert decided(replace(attempt(), status=PENDING), pulse=pulse(most_s + 1)) == Action("wait")
    assert decided(attempt(), pulse=pulse(most_s + 1), limits=Limits(hang_after_s=None)) == Action("wait")


def test_a_job_unknown_to_its_platform_is_waited_for_and_never_doubled() -> None:
    action = decided(replace(attempt(), status=None, error=JobUnknown("no job")))
    assert action.do == "wait" and "unknown to its platform with this login (no job)" in action.why


@pytest.mark.parametrize("half", [None, JobStatus(JobState.PENDING, half_submitted=True)], ids=["not", "half"])
def test_what_was_only_meant_is_started_as_that_attempt_with_the_time_that_it_was_given(half: JobStatus | None) -> None:
    action = decided(replace(attempt(), job=None, status=half), limits=Limits(max_usd=1.0))
    assert action.do == "start" and (action.attempt, action.timeout_s) == (1, 3600)


@pytest.mark.parametrize("end", ["refused", "withdrawn"])
def test_an_attempt_that_was_no_run_is_followed_and_is_no_restart(end: EndState) -> None:
    action = decided(*(attempt(number=number, end=end) for number in (1, 2, 3)), limits=Limits(max_restarts=0))
    assert action.do == "start" and action.attempt == 4


def test_a_job_that_waits_long_for_a_machine_is_said_once_and_left_alone() -> None:
    pending = replace(attempt(), status=PENDING)
    assert decided(pending, later_s=PENDING_PATIENCE_S - 600) == Action("wait")
    late, later = (decided(pending, later_s=PENDING_PATIENCE_S + more) for more in (1, 5000))
    assert late.do == "wait" and "waits for a machine after 10 minutes" in late.why and late == later
