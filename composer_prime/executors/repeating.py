"""Requests that a busy service refused, made again after growing pauses; and what an HTTP refusal means."""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from composer_prime.errors import BadInput, ExecutorError

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waited before a request is repeated, at least; the service may ask for more (Retry-After)."""
LONGEST_WAIT_S = 120.0
"""A service that asks for more is not waited for."""
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Busy(ExecutorError):
    """A request that may succeed when it is repeated. `wait_s`: how long the service asks to wait; 0: it doesn't."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def patiently(
    call: Callable[[], T], recover: Callable[[], T | None] = lambda: None, pauses_s: Sequence[float] = PAUSES_S
) -> T:
    """Make a request, and repeat it while it raises Busy; `recover` may find its result first."""
    failures = 0
    while True:
        try:
            return call()
        except Busy as busy:
            _pause(busy, failures, pauses_s)
        failures += 1
        if (found := recover()) is not None:
            return found


def repeated(read: Callable[[], Iterator[str]]) -> Iterator[str]:
    """All lines of `read`, which is called again after it raised Busy and then gives those that it hasn't given yet.

    Raises Busy when nothing new comes again and again.
    """
    failures = 0
    while True:
        try:
            for line in read():
                failures = 0
                yield line
            return
        except Busy as busy:
            _pause(busy, failures)
        failures += 1


def _pause(busy: Busy, failures: int, pauses_s: Sequence[float] = PAUSES_S) -> None:
    """Wait before the next try. Raises when there were enough, and when the service asks to wait for too long."""
    if failures == len(pauses_s):
        raise busy
    pause_s = max(pauses_s[failures], busy.wait_s)
    if pause_s > LONGEST_WAIT_S:
        raise ExecutorError(f"{busy}, and asks to wait {pause_s:g} s: try again then") from busy
    log.info("repeating a request in_s=%.1f cause=%s", pause_s, busy)
    time.sleep(pause_s)


def refusal(where: str, status: int, wait: str, remedies: Mapping[int, str]) -> BadInput | ExecutorError:
    """The error that an HTTP status stands for: BadInput with its remedy, Busy, or another ExecutorError.

    wait   what the answer says in Retry-After; "": nothing
    """
    if status in remedies:
        return BadInput(f"{where}: {remedies[status]}")
    if status in (408, 429) or status >= 500:
        return Busy(where, float(wait) if wait.isdecimal() else 0.0)
    return ExecutorError(where)


def first_line(text: str) -> str:
    """The first line of a service's words that isn't empty, without colors and its full stop."""
    plain = _ESCAPE.sub("", text)
    return next((line.strip().rstrip(".") for line in plain.splitlines() if line.strip()), "without a word")[:500]
