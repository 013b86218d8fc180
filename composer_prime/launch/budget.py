"""The limits of a launch in money and hours, and so how long its next job may run: pure arithmetic.

A job's time-out, with what its platform may bill beyond it, is its own largest cost. A new job gets no more time than
the budget has left after what was spent and after what all running jobs can still spend, so the sum never passes the
limit, whatever happens to the supervisor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from composer_prime.errors import BadInput
from composer_prime.executors.base import JobState, Price
from composer_prime.launch.records import Attempt
from composer_prime.plan.prices import HOUR_S

MIN_JOB_S = 60
"""Below so many seconds a site would only load its model and end: no job is started for that."""


@dataclass(frozen=True)
class Limits:
    """The limits that a person sets.

    max_restarts   of each site after an attempt that failed, hung or was lost
    max_preemptions, max_timeouts   after one whose machine was taken, or whose time ran out: nothing need be wrong
    max_usd        of all jobs of the launch together; None: no limit
    max_hours      from the launch's first job on; None: no limit
    hang_after_s   without a change of a replica's beat, while its platform says that it runs; None: no watchdog
    stall_after_s  without an inner step, while its beats go on and it waits for nobody; None: not watched
    """

    max_restarts: int = 3
    max_preemptions: int = 100
    max_timeouts: int = 100
    max_usd: float | None = None
    max_hours: float | None = None
    hang_after_s: float | None = 900.0
    stall_after_s: float | None = 3600.0


def times(attempt: Attempt) -> tuple[float | None, float | None]:
    """When an attempt began to run and when it ended, Unix seconds; None: not yet, as far as its platform has
    confirmed. Where its platform doesn't tell, it began when it was asked for, lest it run for free."""
    ended, status = attempt.ended, attempt.status
    if ended is not None:
        return ended.ended_at - ended.seconds, ended.ended_at
    if status is None:
        return None, None
    waited = status.state in (JobState.PENDING, JobState.CANCELLED, JobState.FAILED) and status.exit_code is None
    began = status.started_at
    return (attempt.record.created_at if began is None and not waited else began), status.ended_at


def ran_s(attempt: Attempt, now: float) -> float:
    """Seconds that it has run; nothing is billed for the wait before."""
    began, ended_at = times(attempt)
    return 0.0 if began is None else max(0.0, (now if ended_at is None else ended_at) - began)


def spent_usd(attempt: Attempt, now: float) -> float | None:
    """Dollars that it has cost; None where the price is unknown."""
    price = attempt.record.usd_per_hour
    return None if price is None else ran_s(attempt, now) / HOUR_S * price


def most_usd(attempt: Attempt, now: float) -> float:
    """Dollars that it can have cost when it ends; 0 where the price is unknown."""
    record, seconds = attempt.record, ran_s(attempt, now)
    if times(attempt)[1] is None:
        seconds = max(record.timeout_s, seconds)
    return (seconds + record.overrun_s if seconds else 0.0) / HOUR_S * (record.usd_per_hour or 0.0)


def allowed_s(
    limits: Limits, attempts: Sequence[Attempt], price: Price, *, wanted_s: int, waiting: int, now: float
) -> int:
    """Seconds that a new job may run: at most `wanted_s`, 0 when the budget has not a minute's worth left.

    attempts   of all the launch's sites, since all of them spend its money
    price      of the job; known where money is limited: see `check_bounded`
    waiting    jobs, this one too, that want to start now and share what is left
    """
    seconds = float(wanted_s)
    if limits.max_usd is not None and price.usd_per_hour != 0:
        assert price.usd_per_hour is not None
        left_usd = limits.max_usd - sum(most_usd(each, now) for each in attempts)
        seconds = min(seconds, left_usd / max(1, waiting) / price.usd_per_hour * HOUR_S - price.overrun_s)
    if limits.max_hours is not None:
        began = min((times(each)[0] or each.record.created_at for each in attempts), default=now)
        seconds = min(seconds, began + limits.max_hours * HOUR_S - now)
    return int(seconds) if seconds >= min(MIN_JOB_S, wanted_s) else 0


def check_bounded(limits: Limits, price: Price, on: str) -> None:
    """Raise BadInput for a limit on cost that no job could reach there, or that an hour's price can't keep."""
    if limits.max_usd is None:
        return
    if price.usd_per_hour is None:
        why = f"a job's price is unknown ({price.source}): give it by --usd-per-hour"
    elif price.usd_per_hour == 0:
        why = f"a job's hour costs $0 ({price.source}): give its price by --usd-per-hour"
    elif price.unbounded:
        why = f"an hour of a job may cost more than is listed: {price.unbounded}"
    else:
        return
    kept = f"--max-cost ({limits.max_usd:g}) can't be kept on {on}"
    raise BadInput(f"{kept}, where {why}, or leave --max-cost out and limit --max-hours")
