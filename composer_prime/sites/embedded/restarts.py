"""What a supervisor does when one of its processes has ended: a pure function of who, how, and how often before.

Inference holds nothing that isn't on disk, so it may be restarted; a trainer or an orchestrator that ends early ends
its site, which comes back with --resume.
"""

from __future__ import annotations

import enum

from composer_prime.errors import SystemRefused

ROLES: tuple[str, ...] = ("inference", "orchestrator", "trainer")
MAX_RESTARTS = 3
BAD_INPUT_EXIT = 2


class Verdict(enum.Enum):
    """What an ended process means for its site."""

    EXPECTED = "expected"  # nothing to do
    RESTART = "restart"  # start it again
    FINISHED = "finished"  # the site has its result: wind down
    BAD_INPUT = "bad input"  # its last log line tells the person what to change; or the system refuses it more
    CRASHED = "crashed"  # its last log lines are for whoever debugs it


def judge_exit(role: str, exit_code: int, num_restarts: int, has_result: bool) -> Verdict:
    """What follows from the end of one process.

    exit_code     as subprocess gives it: negative for a signal.
    num_restarts  how often this role was restarted before.
    has_result    whether the trainer's result file is there: from then on the others may end as they like.
    """
    if role == "trainer":
        if exit_code == 0 and has_result:
            return Verdict.FINISHED
    elif has_result:
        return Verdict.EXPECTED
    if exit_code in (BAD_INPUT_EXIT, SystemRefused.exit_code):
        return Verdict.BAD_INPUT
    if role == "inference" and num_restarts < MAX_RESTARTS:
        return Verdict.RESTART
    return Verdict.CRASHED
