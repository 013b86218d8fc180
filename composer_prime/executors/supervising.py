"""What a supervisor does next about each site: pure functions of what was recorded, what platforms say, and the time.

The I/O is fleet.py's. Several supervisors of one launch may decide at once: what they start is create-once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer_prime.executors.base import JobState, JobStatus
from composer_prime.executors.budget import Expense, Limits, allowed_s
from composer_prime.executors.records import Attempt, by_site

BAD_INPUT_EXIT = 2
"""A site's exit code for what only a person can mend: the next attempt would end so too."""
STARTUP_PATIENCE = 4
"""Times `hang_after_s` that a replica may take to its first beat, and from its last one: it loads, and it ends."""
ENDING_STATES = frozenset({"done", "leaving"})


@dataclass(frozen=True)
class Pulse:
    """A site's beat as this supervisor has seen it; times on its own monotonic clock.

    running_since   when it first saw the present attempt running
    changed_at      when it first saw the beat as it is now; None: no change since `running_since`
    state           that the beat tells
    """

    running_since: float
    changed_at: float | None = None
    state: str = ""


@dataclass(frozen=True)
class Start:
    """Start the next attempt of a site."""

    site: str
    attempt: int
    timeout_s: int
    why: str


@dataclass(frozen=True)
class Kill:
    """End an attempt that hangs; its end is recorded as "hung"."""

    site: str
    attempt: int
    why: str


@dataclass(frozen=True)
class Leave:
    """Nothing more is to be done for this site. ok: it ended rightly."""

    site: str
    ok: bool
    why: str


@dataclass(frozen=True)
class Wait:
    """The site's newest attempt is pending or running."""

    site: str


Action = Start | Kill | Leave | Wait
Statuses = Mapping[tuple[str, int], JobStatus]
"""What platforms say, by (site, attempt)."""


def decide(
    sites: Sequence[str],
    attempts: Sequence[Attempt],
    statuses: Statuses,
    pulses: Mapping[str, Pulse],
    limits: Limits,
    *,
    wanted_s: int,
    usd_per_hour: float | None,
    now: float,
    ticks: float,
) -> list[Action]:
    """What to do about each site.

    wanted_s       time-out of a job where the budget doesn't make it shorter
    usd_per_hour   of a job that would be started
    now, ticks     Unix seconds, for money; this process's monotonic seconds, for pulses
    """
    mine = by_site(attempts)
    verdicts = {site: _judge(site, mine.get(site, ()), statuses, pulses.get(site), limits, ticks) for site in sites}
    wanting = [verdict for verdict in verdicts.values() if isinstance(verdict, Start)]
    if not wanting:
        return list(verdicts.values())
    expenses = expenses_of(attempts, statuses)
    seconds = allowed_s(limits, expenses, wanted_s=wanted_s, usd_per_hour=usd_per_hour, waiting=len(wanting), now=now)
    return [_within(verdict, seconds) for verdict in verdicts.values()]


def expenses_of(attempts: Sequence[Attempt], statuses: Statuses) -> list[Expense]:
    """What every attempt has cost and can cost. One without a job costs nothing once it has an end."""
    return [_expense(attempt, statuses.get((attempt.site, attempt.number))) for attempt in attempts]


def _expense(attempt: Attempt, status: JobStatus | None) -> Expense:
    intent, ended = attempt.intent, attempt.ended
    if ended is not None:
        times = (ended.ended_at - ended.seconds, ended.ended_at)
    elif status is not None:
        times = (status.started_at, status.ended_at)
    else:
        times = (None, None)
    return Expense(intent.created_at, *times, intent.timeout_s, intent.usd_per_hour)


def _judge(
    site: str,
    attempts: Sequence[Attempt],
    statuses: Statuses,
    pulse: Pulse | None,
    limits: Limits,
    ticks: float,
) -> Action:
    if not attempts:
        return Start(site, 1, 0, "first start")
    last = attempts[-1]
    status = statuses.get((site, last.number))
    if last.ended is not None:
        state, exit_code = last.ended.state, last.ended.exit_code
    elif status is None:
        return Wait(site)  # its platform gave no answer this time
    elif not status.state.final:
        hangs = _hangs(status, pulse, limits, ticks)
        return Wait(site) if hangs is None else Kill(site, last.number, hangs)
    else:
        state, exit_code = status.state.value, status.exit_code
    return _after(site, last.number, state, exit_code, limits)


def _after(site: str, number: int, state: str, exit_code: int | None, limits: Limits) -> Action:
    """What follows from an attempt's end."""
    if state == "succeeded":
        return Leave(site, True, "done")
    if state == "cancelled":
        return Leave(site, False, "cancelled")
    if state == "failed" and exit_code == BAD_INPUT_EXIT:
        return Leave(site, False, f"exit code {BAD_INPUT_EXIT}: its log says what to mend")
    why = f"{state}, exit code {exit_code}" if state == "failed" and exit_code is not None else state
    if number > limits.max_restarts:
        return Leave(site, False, f"{why}, and --max-restarts ({limits.max_restarts}) is used up")
    return Start(site, number + 1, 0, why)


def _within(action: Action, seconds: int) -> Action:
    if not isinstance(action, Start):
        return action
    if seconds == 0:
        return Leave(action.site, False, f"{action.why}, and the budget has no time left for another job")
    return Start(action.site, action.attempt, seconds, action.why)


def _hangs(status: JobStatus, pulse: Pulse | None, limits: Limits, ticks: float) -> str | None:
    """Why a running replica is taken for hanging; None: it isn't."""
    if limits.hang_after_s is None or pulse is None or status.state is not JobState.RUNNING:
        return None
    patient = pulse.changed_at is None or pulse.state in ENDING_STATES
    limit_s = limits.hang_after_s * (STARTUP_PATIENCE if patient else 1)
    silent_s = ticks - (pulse.running_since if pulse.changed_at is None else pulse.changed_at)
    if silent_s < limit_s:
        return None
    return f"no beat for {silent_s:.0f} s, and the limit is {limit_s:.0f} s (--hang-after)"
