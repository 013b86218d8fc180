"""What a supervisor does next about each site: pure functions of what was recorded, what platforms say, and the time.

The I/O is fleet.py's. Several supervisors of one launch may decide at once: what they start is create-once.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime

from composer_prime.executors.base import JobState, JobStatus
from composer_prime.launch.budget import Expense, Limits, allowed_s, ran_from
from composer_prime.launch.records import NOT_RUN, Attempt, by_site

BAD_INPUT_EXIT = 2
"""A site's exit code for what only a person can mend: the next attempt would end so too."""
STARTUP_PATIENCE = 4
"""Times `hang_after_s` that a replica may take to its first beat, and from its last one: it loads, and it ends."""
PENDING_PATIENCE_S = 600.0
"""After that it is said that a job still waits for a machine. Nothing ends it: queues are long."""
ENDING_STATES = frozenset({"done", "leaving"})


@dataclass(frozen=True)
class Pulse:
    """A site's beat as this supervisor has seen it; times on its own monotonic clock.

    running_since   when it first saw the present attempt running
    changed_at      when it first saw the beat as it is now; None: no change since `running_since`
    state           that the beat tells
    stood_since     when it first saw the inner step as it is now, or last saw the site wait for a round with its offer
                    out; None: no beat since `running_since`
    has_stepped     whether it has seen the present attempt make an inner step
    """

    running_since: float
    changed_at: float | None = None
    state: str = ""
    stood_since: float | None = None
    has_stepped: bool = False


@dataclass(frozen=True)
class Start:
    """Start the next attempt of a site."""

    site: str
    attempt: int
    timeout_s: int
    why: str


@dataclass(frozen=True)
class Kill:
    """End an attempt that hangs, or on which a verdict stands whose end nobody has confirmed."""

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
    """The site's newest attempt is pending or running, or may be. why: what a person should know of it."""

    site: str
    why: str = ""


Action = Start | Kill | Leave | Wait
Place = tuple[str, int]
"""(site, attempt)."""
Statuses = Mapping[Place, JobStatus]
"""What platforms say."""


@dataclass(frozen=True)
class Standing:
    """What was found out at one look, beside the records of attempts.

    statuses   what platforms say
    unknown    attempts whose jobs their platforms don't know, asked with this machine's login
    stopped    sites that somebody ended
    mended     ends in NOT_RUN that are older than this launch command, which was given to mend them
    """

    statuses: Statuses
    unknown: Set[Place] = frozenset()
    stopped: Set[str] = frozenset()
    mended: Set[Place] = frozenset()


def decide(
    sites: Sequence[str],
    attempts: Sequence[Attempt],
    standing: Standing,
    pulses: Mapping[str, Pulse],
    limits: Limits,
    *,
    wanted_s: int,
    usd_per_hour: float | None,
    overrun_s: int = 0,
    now: float,
    ticks: float,
) -> list[Action]:
    """What to do about each site.

    attempts       of all the launch's sites, since all of them spend its money
    wanted_s       time-out of a job where the budget doesn't make it shorter
    usd_per_hour, overrun_s   of a job that would be started
    now, ticks     Unix seconds, for money; this process's monotonic seconds, for pulses
    """
    mine = by_site(attempts)
    verdicts = {
        site: _judge(site, mine.get(site, ()), standing, pulses.get(site), limits, now, ticks) for site in sites
    }
    wanting = [verdict for verdict in verdicts.values() if isinstance(verdict, Start)]
    if not wanting:
        return list(verdicts.values())
    seconds = allowed_s(
        limits,
        expenses_of(attempts, standing.statuses),
        wanted_s=wanted_s,
        usd_per_hour=usd_per_hour,
        overrun_s=overrun_s,
        waiting=len(wanting),
        now=now,
    )
    return [_within(verdict, seconds) for verdict in verdicts.values()]


def expenses_of(attempts: Sequence[Attempt], statuses: Statuses) -> list[Expense]:
    """What every attempt has cost and can cost. One without a job costs nothing once it has an end."""
    return [_expense(attempt, statuses.get((attempt.site, attempt.number))) for attempt in attempts]


def _expense(attempt: Attempt, status: JobStatus | None) -> Expense:
    record, ended = attempt.record, attempt.ended
    if ended is not None:
        times = (ended.ended_at - ended.seconds, ended.ended_at)
    elif status is not None:
        times = (ran_from(status, record.created_at), status.ended_at)
    else:
        times = (None, None)
    return Expense(record.created_at, *times, record.timeout_s, record.usd_per_hour, record.overrun_s)


def _judge(
    site: str,
    attempts: Sequence[Attempt],
    standing: Standing,
    pulse: Pulse | None,
    limits: Limits,
    now: float,
    ticks: float,
) -> Action:
    if not attempts:
        return Leave(site, False, "cancelled") if site in standing.stopped else Start(site, 1, 0, "first start")
    last = attempts[-1]
    place = (site, last.number)
    status = standing.statuses.get(place)
    if last.ended is not None:
        return _after(site, attempts, last.ended.state, last.ended.exit_code, standing, limits)
    if place in standing.unknown:
        until = datetime.fromtimestamp(last.due, UTC)
        return Wait(
            site,
            f"attempt {last.number} is unknown to its platform with this login, and may run where it was launched: "
            f"the next one starts when its time has passed ({until:%Y-%m-%d %H:%M} UTC)",
        )
    if status is not None and status.state.final:
        return _after(site, attempts, status.state.value, status.exit_code, standing, limits)
    if last.verdict is not None:
        return Kill(site, last.number, last.verdict.why)
    if status is None:
        return Wait(site)  # its platform gave no answer this time
    if status.state is JobState.PENDING and now - last.record.created_at > PENDING_PATIENCE_S:
        return Wait(
            site, f"attempt {last.number} still waits for a machine after {PENDING_PATIENCE_S / 60:.0f} minutes"
        )
    hangs = _hangs(status, pulse, limits, ticks) or _stands_still(status, pulse, limits, ticks)
    return Wait(site) if hangs is None else Kill(site, last.number, hangs)


def _after(
    site: str,
    attempts: Sequence[Attempt],
    state: str,
    exit_code: int | None,
    standing: Standing,
    limits: Limits,
) -> Action:
    """What follows from the end of a site's newest attempt."""
    last = attempts[-1]
    if state == "succeeded":
        return Leave(site, True, "done")
    if state == "cancelled" or site in standing.stopped:
        return Leave(site, False, "cancelled")
    if state in NOT_RUN and (site, last.number) not in standing.mended:
        return Leave(site, False, f"{state}: {last.ended.message if last.ended else ''}")
    if state == "failed" and exit_code == BAD_INPUT_EXIT:
        return Leave(site, False, f"exit code {BAD_INPUT_EXIT}: its log says what to mend")
    why = f"{state}, exit code {exit_code}" if state == "failed" and exit_code is not None else state
    earlier = [each.ended.state for each in attempts[:-1] if each.ended is not None]
    option, most = _budget(state, limits)
    if state not in NOT_RUN and sum(_budget(each, limits)[0] == option for each in (*earlier, state)) > most:
        return Leave(site, False, f"{why}, and {option} ({most}) is used up")
    return Start(site, last.number + 1, 0, why)


def _budget(state: str, limits: Limits) -> tuple[str, int]:
    """The option that limits restarts after an attempt's end in `state`, and how many it allows."""
    if state in NOT_RUN:
        return "", 0
    if state == "preempted":
        return "--max-preemptions", limits.max_preemptions
    if state == "timed-out":
        return "--max-timeouts", limits.max_timeouts
    return "--max-restarts", limits.max_restarts


def _within(action: Action, seconds: int) -> Action:
    if not isinstance(action, Start):
        return action
    if seconds == 0:
        return Leave(action.site, False, f"{action.why}, and the budget has no time left for another job")
    return Start(action.site, action.attempt, seconds, action.why)


def _hangs(status: JobStatus, pulse: Pulse | None, limits: Limits, ticks: float) -> str | None:
    """Why a running replica whose beats stopped is taken for hanging; None: it isn't."""
    if limits.hang_after_s is None or pulse is None or status.state is not JobState.RUNNING:
        return None
    patient = pulse.changed_at is None or pulse.state in ENDING_STATES
    limit_s = limits.hang_after_s * (STARTUP_PATIENCE if patient else 1)
    silent_s = ticks - (pulse.running_since if pulse.changed_at is None else pulse.changed_at)
    if silent_s < limit_s:
        return None
    return f"no beat for {silent_s:.0f} s, and the limit is {limit_s:.0f} s (--hang-after)"


def _stands_still(status: JobStatus, pulse: Pulse | None, limits: Limits, ticks: float) -> str | None:
    """Why a replica whose beats go on is taken for hanging; None: it isn't. One that ends waits for the others."""
    if limits.stall_after_s is None or pulse is None or status.state is not JobState.RUNNING:
        return None
    if pulse.stood_since is None or pulse.state in ENDING_STATES:
        return None
    limit_s = limits.stall_after_s * (1 if pulse.has_stepped else STARTUP_PATIENCE)
    stood_s = ticks - pulse.stood_since
    if stood_s < limit_s:
        return None
    return (
        f"no inner step for {stood_s:.0f} s though no offer of it waits for others, and the limit is {limit_s:.0f} s "
        "(launch.stall_after_s)"
    )
