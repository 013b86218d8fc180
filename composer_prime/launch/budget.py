"""What a launch may cost and how long it may last, and so how long its next job may run: pure arithmetic.

A job's time-out, with what its platform may bill beyond it, is its own largest cost. A new job gets no more time than
the budget has left after what was spent and after what all running jobs can still spend, so the sum never passes the
limit, whatever happens to the supervisor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from composer_prime.errors import BadInput
from composer_prime.executors.base import JobState, JobStatus, Price

HOUR_S = 3600.0
MIN_JOB_S = 60
"""Below so many seconds a site would only load its model and end: no job is started for that."""


@dataclass(frozen=True)
class Limits:
    """What a person allows.

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


@dataclass(frozen=True)
class Expense:
    """One attempt, as far as money goes. Times are Unix seconds.

    asked_at     before anything was started
    started_at   None: not yet; nothing is billed for the wait
    ended_at     None: not yet, as far as its platform has confirmed
    timeout_s    after which it ends by itself
    overrun_s    that may be billed beyond what it ran
    usd_per_hour None: unknown
    """

    asked_at: float
    started_at: float | None
    ended_at: float | None
    timeout_s: float
    usd_per_hour: float | None
    overrun_s: float = 0.0

    def seconds(self, now: float) -> float:
        """That it has run."""
        until = now if self.ended_at is None else self.ended_at
        return 0.0 if self.started_at is None else max(0.0, until - self.started_at)

    def usd(self, now: float) -> float | None:
        """That it has cost; None where the price is unknown."""
        return None if self.usd_per_hour is None else self.seconds(now) / HOUR_S * self.usd_per_hour

    def most_usd(self, now: float) -> float:
        """That it can have cost when it ends; nothing where the price is unknown."""
        seconds = self.seconds(now) if self.ended_at is not None else max(self.timeout_s, self.seconds(now))
        return (seconds + self.overrun_s if seconds else 0.0) / HOUR_S * (self.usd_per_hour or 0.0)


def ran_from(status: JobStatus, asked_at: float) -> float | None:
    """When a job began to run; None: it hasn't. Where its platform doesn't tell, `asked_at`, lest it run for free."""
    if status.started_at is not None:
        return status.started_at
    waited = status.state in (JobState.PENDING, JobState.CANCELLED, JobState.FAILED) and status.exit_code is None
    return None if waited else asked_at


def allowed_s(
    limits: Limits,
    expenses: Sequence[Expense],
    *,
    wanted_s: int,
    usd_per_hour: float | None,
    overrun_s: int = 0,
    waiting: int,
    now: float,
) -> int:
    """Seconds that a new job may run: at most `wanted_s`, 0 when the budget has not a minute's worth left.

    usd_per_hour   known where money is limited: see `check_bounded`
    overrun_s   seconds beyond those that may be billed
    waiting     jobs, this one too, that want to start now and share what is left
    """
    seconds = float(wanted_s)
    if limits.max_usd is not None and usd_per_hour != 0:
        assert usd_per_hour is not None
        left_usd = limits.max_usd - sum(each.most_usd(now) for each in expenses)
        seconds = min(seconds, left_usd / max(1, waiting) / usd_per_hour * HOUR_S - overrun_s)
    if limits.max_hours is not None:
        began = min((each.started_at or each.asked_at for each in expenses), default=now)
        seconds = min(seconds, began + limits.max_hours * HOUR_S - now)
    return int(seconds) if seconds >= min(MIN_JOB_S, wanted_s) else 0


def price_of_job(listed: Price, usd_per_hour: float | None) -> Price:
    """A job's price: what the person said of it, else what its platform lists."""
    return listed if usd_per_hour is None else replace(listed, usd_per_hour=usd_per_hour, source="--usd-per-hour")


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
