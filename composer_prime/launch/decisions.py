"""The next action of a supervisor for each site: pure functions of its attempts, as they were looked at, and the time.

The I/O is fleet.py's and supervisor.py's. Several supervisors of one launch may decide at once: what they start is
create-once.

A site's beat comes from a task of its own and goes on while training hangs; so the inner step that it tells counts,
too. A site that waits for others makes no step either, and is known by its offer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from composer_prime.executors.base import JobState, Price
from composer_prime.launch.budget import Limits, allowed_s
from composer_prime.launch.records import Attempt, Ended, by_site

BAD_INPUT_EXIT = 2
"""A site's exit code for what only a person can mend: the next attempt would end so too."""
LIMITED_BY = {"preempted": "max_preemptions", "timed-out": "max_timeouts"} | dict.fromkeys(
    ("failed", "hung", "lost"), "max_restarts"
)
"""The field of Limits that counts restarts after an end. Others are followed by none, or were no run."""
PENDING_PATIENCE_S = 600.0
"""After that it is said that a job still waits for a machine. Nothing ends it: queues are long."""

STARTUP_PATIENCE = 4
"""Times its limit that a replica may take to its first beat and step, and from its last beat: it loads, and it ends."""
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
class Action:
    """A step for one site, and why.

    do   "start": have the job of an attempt, the next one or one that was only meant; "end": the newest one hangs, or
         was stopped and may run; "wait": it is pending or running, or may be; "give up" and "done": leave the site
    attempt, timeout_s   of a start; 0 seconds where the budget is to say
    """

    do: Literal["start", "end", "wait", "give up", "done"]
    why: str = ""
    attempt: int = 0
    timeout_s: int = 0


def decide(
    sites: Sequence[str],
    attempts: Sequence[Attempt],
    pulses: Mapping[str, Pulse],
    limits: Limits,
    price: Price,
    *,
    wanted_s: int,
    now: float,
    ticks: float,
) -> dict[str, Action]:
    """Choose an action for each site.

    attempts    of all the launch's sites, since all of them spend its money; what has ended is settled
    price       of a job that would be started
    wanted_s    time-out of a job where the budget doesn't make it shorter
    now, ticks  Unix seconds, for money; this process's monotonic seconds, for pulses
    """
    mine = by_site(attempts)
    actions = {site: _judge(mine.get(site, ()), pulses.get(site), limits, now, ticks) for site in sites}
    waiting = [site for site, action in actions.items() if action.do == "start" and not action.timeout_s]
    if waiting:
        seconds = allowed_s(limits, attempts, price, wanted_s=wanted_s, waiting=len(waiting), now=now)
        for site in waiting:
            why = f"{actions[site].why}, and the budget has no time left for another job"
            actions[site] = replace(actions[site], timeout_s=seconds) if seconds else Action("give up", why)
    return actions


def _judge(attempts: Sequence[Attempt], pulse: Pulse | None, limits: Limits, now: float, ticks: float) -> Action:
    if not attempts:
        return Action("start", "first start", 1)
    last, status = attempts[-1], attempts[-1].status
    if last.ended is not None:
        return _after(attempts, last.ended, limits)
    if last.is_unknown:
        return Action("wait", f"attempt {last.number} is {last.problem}; the next one starts then")
    if last.stop is not None:
        return Action("end", last.stop.why or last.stop.state)
    if last.is_only_meant or (status is not None and status.half_submitted):
        return Action("start", "whoever meant to start it ended before", last.number, last.record.timeout_s)
    if status is None:
        return Action("wait")  # its platform gave no answer this time
    if status.state is JobState.PENDING and now - last.record.created_at > PENDING_PATIENCE_S:
        return Action(
            "wait", f"attempt {last.number} still waits for a machine after {PENDING_PATIENCE_S / 60:.0f} minutes"
        )
    why = hangs(pulse, limits, ticks) if pulse is not None and status.state is JobState.RUNNING else ""
    return Action("end", why) if why else Action("wait")


def _after(attempts: Sequence[Attempt], ended: Ended, limits: Limits) -> Action:
    """The action after the end of a site's newest attempt."""
    last, state, exit_code = attempts[-1], ended.state, ended.exit_code
    if state == "succeeded":
        return Action("done", "done")
    if state == "cancelled" or (last.stop is not None and last.stop.state == "cancelled"):
        return Action("give up", "cancelled")
    if state == "failed" and exit_code == BAD_INPUT_EXIT:
        return Action("give up", f"exit code {BAD_INPUT_EXIT}: its log says what to mend")
    why = f"{state}, exit code {exit_code}" if state == "failed" and exit_code is not None else state
    if limit := LIMITED_BY.get(state):
        used = sum(LIMITED_BY.get(each.ended.state) == limit for each in attempts if each.ended is not None)
        if used > (most := getattr(limits, limit)):
            return Action("give up", f"{why}, and --{limit.replace('_', '-')} ({most}) is used up" if most else why)
    return Action("start", why, last.number + 1)


def hangs(pulse: Pulse, limits: Limits, ticks: float) -> str:
    """Why a running replica is taken for hanging: its beats stopped, or go on without a step; "": it isn't. One that
    ends waits for the others."""
    ends, changed_at = pulse.state in ENDING_STATES, pulse.changed_at
    beats = (pulse.running_since if changed_at is None else changed_at), changed_at is None or ends
    steps = (None if ends else pulse.stood_since), not pulse.has_stepped
    for (since, patient), limit_s, what, option in (
        (beats, limits.hang_after_s, "no beat", "--hang-after"),
        (steps, limits.stall_after_s, "no inner step", "launch.stall_after_s"),
    ):
        most_s = (limit_s or math.inf) * (STARTUP_PATIENCE if patient else 1)
        if since is not None and ticks - since >= most_s:
            return f"{what} for {ticks - since:.0f} s, and the limit is {most_s:.0f} s ({option})"
    return ""
