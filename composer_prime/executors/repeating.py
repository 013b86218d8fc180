"""Requests that a busy platform refused, made again after growing pauses."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from composer_prime.errors import ExecutorError

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waited before a request is repeated, at least; the service may ask for more (Retry-After)."""
LONGEST_WAIT_S = 120.0
"""A service that asks for more is not waited for."""


class Busy(ExecutorError):
    """A request that may succeed when it is repeated. `wait_s`: how long the service asks to wait; 0: it doesn't."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def patiently(
    call: Callable[[], T], recover: Callable[[], T | None] = lambda: None, pauses_s: Sequence[float] = PAUSES_S
) -> T:
    """Make a request, and repeat it while it raises Busy; `recover` may find its result first."""
    for pause_s in pauses_s:
        try:
            return call()
        except Busy as busy:
            if busy.wait_s > LONGEST_WAIT_S:
                raise ExecutorError(f"{busy}, and asks to wait {busy.wait_s:g} s: try again then") from busy
            log.info("repeating a request in_s=%.1f cause=%s", max(pause_s, busy.wait_s), busy)
            time.sleep(max(pause_s, busy.wait_s))
        if (found := recover()) is not None:
            return found
    return call()
