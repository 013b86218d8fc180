"""The budget: what a new job may take, and that the sum never passes the limit."""

import random
from dataclasses import replace

import pytest

from composer_prime.errors import BadInput
from composer_prime.executors.base import JobState, JobStatus, Price
from composer_prime.launch.budget import HOUR_S, Limits, allowed_s, check_bounded, most_usd, spent_usd, times
from composer_prime.launch.records import Attempt
from tests.executors.launches import attempt_at

NOW = 1_000_000.0
DAY_S = 24 * 3600


PRICE = Price(2.0, "the test")
FREE = Price(0.0, "the test")


def asked(timeout_s: float, usd: float | None = 2.0, overrun_s: int = 0, at: float = NOW) -> Attempt:
    return attempt_at(at, timeout_s=round(timeout_s), usd_per_hour=usd, overrun_s=overrun_s)


def running(hours: float, timeout_h: float, usd: float | None = 2.0) -> Attempt:
    began = NOW - hours * HOUR_S
    return replace(asked(timeout_h * HOUR_S, usd, at=began), status=JobStatus(JobState.RUNNING, started_at=began))


def ran(attempt: Attempt, began: float | None, ended: float) -> Attempt:
    return replace(attempt, status=JobStatus(JobState.CANCELLED, started_at=began, ended_at=ended))


def ended(hours: float, usd: float | None = 2.0) -> Attempt:
    began = NOW - 50 * HOUR_S
    return ran(asked(DAY_S, usd, at=began), began, began + hours * HOUR_S)


@pytest.mark.parametrize(
    ("limits", "attempts", "price", "waiting", "seconds"),
    [
        (Limits(), [running(5, 9)], Price(None, ""), 1, DAY_S),
        (Limits(max_usd=8.0), [], PRICE, 2, 2 * HOUR_S),
        (Limits(max_usd=20.0), [ended(1), running(1, 4)], PRICE, 1, 5 * HOUR_S),  # 2 spent, 8 at most
        (Limits(max_usd=2.01), [ended(1)], PRICE, 1, 0),
        (Limits(max_hours=49.0), [ended(1)], FREE, 1, 0),
        (Limits(max_hours=51.0), [ended(1)], FREE, 3, HOUR_S),
        (Limits(max_usd=0.01), [running(9, 9, 0.0)], FREE, 1, DAY_S),
    ],
    ids=["no limit", "shared", "kept for running ones", "spent", "over", "hours from the first job", "free"],
)
def test_a_new_job_gets_what_the_limits_leave_after_all_that_was_and_can_be_spent(
    limits: Limits, attempts: list[Attempt], price: Price, waiting: int, seconds: float
) -> None:
    assert allowed_s(limits, attempts, price, wanted_s=DAY_S, waiting=waiting, now=NOW) == seconds


@pytest.mark.parametrize(
    ("price", "why"),
    [
        (Price(None, "H1000 is not in the list"), r"price is unknown \(H1000 is not in the list\): give it by"),
        (Price(0.0, "this machine"), r"on moon, where a job's hour costs \$0 \(this machine\)"),
    ],
    ids=["unknown", "nothing"],
)
def test_a_limit_on_cost_that_could_never_bite_is_refused_with_its_reason_and_what_to_do(
    price: Price, why: str
) -> None:
    with pytest.raises(BadInput, match=rf"--max-cost \(5\) .*{why}.* --usd-per-hour, or leave .* --max-hours"):
        check_bounded(Limits(max_usd=5.0), price, "moon")
    check_bounded(Limits(max_hours=5.0), price, "moon")
    check_bounded(Limits(max_usd=5.0), PRICE, "moon")


def test_what_may_be_billed_is_kept_back_also_beyond_a_time_out_and_a_job_that_never_ran_costs_nothing() -> None:
    meant = asked(HOUR_S, 3600.0, 100)
    assert spent_usd(meant, NOW + 60) == 0.0
    assert most_usd(meant, NOW) == pytest.approx(HOUR_S + 100)
    assert most_usd(ran(meant, NOW, NOW + 10), NOW + 20) == pytest.approx(110)
    assert most_usd(ran(meant, None, NOW + 10), NOW + 20) == 0


@pytest.mark.parametrize(
    ("status", "began"),
    [
        (JobStatus(JobState.RUNNING, started_at=NOW + 5), NOW + 5),
        (JobStatus(JobState.RUNNING), NOW),
        (JobStatus(JobState.PREEMPTED), NOW),
        (JobStatus(JobState.FAILED, 1), NOW),
        (JobStatus(JobState.PENDING), None),
        (JobStatus(JobState.CANCELLED), None),
        (JobStatus(JobState.FAILED), None),
    ],
)
def test_a_job_that_ran_since_nobody_knows_when_ran_since_it_was_asked_for(
    status: JobStatus, began: float | None
) -> None:
    assert times(replace(asked(HOUR_S), status=status))[0] == began


@pytest.mark.parametrize("seed", range(30))
def test_the_sum_never_passes_the_limit_whatever_ends_when(seed: int) -> None:
    draw = random.Random(seed)
    limits, now = Limits(max_usd=draw.uniform(1, 50)), NOW
    price = Price(draw.uniform(0.1, 9), "", draw.choice((0, 100)))
    attempts: list[Attempt] = []
    for _ in range(60):
        seconds = allowed_s(limits, attempts, price, wanted_s=DAY_S, waiting=draw.randint(1, 3), now=now)
        if seconds:
            new = asked(seconds, price.usd_per_hour, price.overrun_s, at=now)
            attempts.append(replace(new, status=JobStatus(JobState.RUNNING, started_at=now)))
        now += draw.uniform(0, 2 * HOUR_S)
        for place, each in enumerate(attempts):
            began, ended_at = times(each)
            if ended_at is None and began is not None:
                due = began + each.record.timeout_s
                if now >= due or draw.random() < 0.3:
                    attempts[place] = ran(each, began, min(now, due))
    assert limits.max_usd is not None
    assert sum(most_usd(each, now) for each in attempts) <= limits.max_usd + 1e-9, f"seed {seed}"
