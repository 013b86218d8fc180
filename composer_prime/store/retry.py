"""When to try again, and until when: the one loop of retries, shared by the stores that talk to a server.

Pauses grow and are drawn at random, so that sites which lost the same server don't come back to it together.
"""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 30
"""For how long, after its first failure, an operation on a store that has answered before is tried again."""
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 4

OPERATION_S = 90
"""Longest that an operation may take in all, tries and pauses included, apart from the bytes it moves."""
SLOWEST_BYTES_PER_S = 2**18
"""A transfer slower than this counts as lost, even when bytes still trickle."""
UNKNOWN_SIZE_S = 3600
"""Longest that reading an object of unknown size may take."""


@dataclass(frozen=True)
class Patience:
    """How long one operation may take: `retry_s` after its first failure, and `deadline_s` in all."""

    retry_s: float
    deadline_s: float


def patience_for(num_bytes: int | None) -> Patience:
    """The patience for an operation that moves `num_bytes`; None for a read of unknown size."""
    if num_bytes is None:
        return Patience(RETRY_S, UNKNOWN_SIZE_S)
    return Patience(RETRY_S, OPERATION_S + num_bytes / SLOWEST_BYTES_PER_S)


def retry(
    attempt: Callable[[float], T],
    patience: Patience,
    *,
    failures: tuple[type[Exception], ...],
    may_pass: Callable[[Exception], bool],
    what: str,
    level: int = logging.WARNING,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """The attempt's result; it is repeated while its failure may pass and there is time.

    attempt    gets the seconds left until the deadline, which it must keep.
    failures   the exceptions that count as such; others end the loop.
    may_pass   whether another try makes sense after this failure.
    what       names the operation in the log, at `level`.

    Raises the last failure.
    """
    deadline = clock() + patience.deadline_s
    give_up_at: float | None = None
    longest_pause = FIRST_PAUSE_S
    while True:
        try:
            return attempt(max(deadline - clock(), 0.001))
        except failures as error:
            pause = random.uniform(longest_pause / 2, longest_pause)
            now = clock()
            give_up_at = min(deadline, now + patience.retry_s) if give_up_at is None else give_up_at
            if not may_pass(error) or now + pause > give_up_at:
                raise
            cause = str(error).partition("\n")[0] or type(error).__name__
            log.log(level, "%s retry_in_s=%.2f cause=%r", what, pause, cause)
        sleep(pause)
        longest_pause = min(2 * longest_pause, MAX_PAUSE_S)
