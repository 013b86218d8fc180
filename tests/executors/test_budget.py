"""The budget: what a new job may take, and that the sum never passes the limit."""

import random

import pytest

from composer_prime.errors import BadInput
from composer_prime.executors.base import JobState, JobStatus, Price
from composer_prime.launch.budget import (
    HOUR_S,
    Expense,
    Limits,
    allowed_s,
    check_bounded,
    price_of_job,
    ran_from,
)

NOW = 1_000_000.0
DAY_S = 24 * 3600


def running(hours: float, timeout_h: float, usd: float | None = 2.0) -> Expense:
    return Expense(NOW - hours * HOUR_S, NOW - hours * HOUR_S, None, timeout_h * HOUR_S, usd)


def ended(hours: float, usd: float | None = 2.0) -> Expense:
    return Expense(NOW - 50 * HOUR_S, NOW - 50 * HOUR_S, NOW - (50 - hours) * HOUR_S, DAY_S, usd)


def test_without_limits_a_job_gets_what_it_wants() -> None:
    assert allowed_s(Limits(), [running(5, 9)], wanted_s=DAY_S, usd_per_hour=None, waiting=1, now=NOW) == DAY_S


def test_a_cost_limit_is_shared_by_those_who_wait() -> None:
    limits = Limits(max_usd=8.0)
    assert allowed_s(limits, [], wanted_s=DAY_S, usd_per_hour=2.0, waiting=2, now=NOW) == 2 * HOUR_S


def test_what_running_jobs_can_still_spend_is_kept_for_them() -> None:
    limits = Limits(max_usd=20.0)
    expenses = [ended(1), running(1, 4)]  # 2 spent, 8 at most
    assert allowed_s(limits, expenses, wanted_s=DAY_S, usd_per_hour=2.0, waiting=1, now=NOW) == 5 * HOUR_S


def test_a_spent_budget_starts_nothing() -> None:
    assert allowed_s(Limits(max_usd=2.01), [ended(1)], wanted_s=DAY_S, usd_per_hour=2.0, waiting=1, now=NOW) == 0
    assert allowed_s(Limits(max_hours=49.0), [ended(1)], wanted_s=DAY_S, usd_per_hour=0.0, waiting=1, now=NOW) == 0


def test_hours_count_from_the_first_job() -> None:
    seconds = allowed_s(Limits(max_hours=51.0), [ended(1)], wanted_s=DAY_S, usd_per_hour=0.0, waiting=3, now=NOW)
    assert seconds == HOUR_S


def test_a_limit_on_cost_cuts_no_job_that_costs_nothing() -> None:
    limits = Limits(max_usd=0.01)
    assert allowed_s(limits, [running(9, 9, 0.0)], wanted_s=60, usd_per_hour=0.0, waiting=1, now=NOW) == 60


@pytest.mark.parametrize(
    ("listed", "said_usd", "why"),
    [
        (Price(None, "H1000 is not in the list"), None, r"price is unknown \(H1000 is not in the list\): give it by"),
        (Price(0.0, "this machine"), None, r"on moon, where a job's hour costs \$0 \(this machine\)"),
        (Price(2.0, "the list"), 0.0, r"costs \$0 \(--usd-per-hour\)"),
    ],
    ids=["unknown", "nothing", "said to be nothing"],
)
def test_a_limit_on_cost_that_could_never_bite_is_refused_with_its_reason_and_what_to_do(
    listed: Price, said_usd: float | None, why: str
) -> None:
    price = price_of_job(listed, said_usd)
    with pytest.raises(BadInput, match=rf"--max-cost \(5\) .*{why}.* --usd-per-hour, or leave .* --max-hours"):
        check_bounded(Limits(max_usd=5.0), price, "moon")
    check_bounded(Limits(max_hours=5.0), price, "moon")
    check_bounded(Limits(max_usd=5.0), price_of_job(listed, 1.5), "moon")


def test_what_is_not_known_to_have_started_costs_nothing_yet_but_is_kept() -> None:
    asked = Expense(NOW, None, None, HOUR_S, 3.0)
    assert asked.usd(NOW + 60) == 0.0 and asked.most_usd(NOW + 60) == 3.0


def test_what_is_billed_beyond_a_time_out_is_kept_back_and_a_job_that_never_ran_costs_nothing() -> None:
    asked = Expense(NOW, None, None, HOUR_S, 3600.0, 100.0)
    assert asked.most_usd(NOW) == pytest.approx(HOUR_S + 100)
    assert Expense(NOW, NOW, NOW + 10, HOUR_S, 3600.0, 100.0).most_usd(NOW + 20) == pytest.approx(110)
    assert Expense(NOW, None, NOW + 10, HOUR_S, 3600.0, 100.0).most_usd(NOW + 20) == 0


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
    assert ran_from(status, NOW) == began


@pytest.mark.parametrize("seed", range(30))
def test_the_sum_never_passes_the_limit_whatever_ends_when(seed: int) -> None:
    draw = random.Random(seed)
    limits, price, now = Limits(max_usd=draw.uniform(1, 50)), draw.uniform(0.1, 9), NOW
    expenses: list[Expense] = []
    overrun_s = draw.choice((0, 100))
    for _ in range(60):
        seconds = allowed_s(
            limits,
            expenses,
            wanted_s=DAY_S,
            usd_per_hour=price,
            overrun_s=overrun_s,
            waiting=draw.randint(1, 3),
            now=now,
        )
        if seconds:
            expenses.append(Expense(now, now, None, seconds, price, overrun_s))
        now += draw.uniform(0, 2 * HOUR_S)
        for place, each in enumerate(expenses):
            if each.ended_at is None and each.started_at is not None:
                due = each.started_at + each.timeout_s
                if now >= due or draw.random() < 0.3:
                    expenses[place] = Expense(now, each.started_at, min(now, due), each.timeout_s, price, overrun_s)
    assert limits.max_usd is not None
    assert sum(each.most_usd(now) for each in expenses) <= limits.max_usd + 1e-9, f"seed {seed}"
