"""Requests that a busy service refused, made again after growing pauses; and what an HTTP refusal means."""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from composer_prime.errors import BadInput, ExecutorError

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waited before a request is repeated."""
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Busy(ExecutorError):
    """A request that may succeed when it is repeated."""


def patiently(call: Callable[[], T]) -> T:
    """Make a request, and repeat it while it raises Busy."""
    return next(repeated(lambda: iter([call()])))


def repeated(read: Callable[[], Iterator[T]]) -> Iterator[T]:
    """All items of `read`, which is called again after it raised Busy and then gives those that it hasn't given yet.

    Raises ExecutorError when nothing new comes again and again.
    """
    failures = 0
    while True:
        try:
            for item in read():
                failures = 0
                yield item
            return
        except Busy as busy:
            if failures == len(PAUSES_S):
                raise ExecutorError(str(busy)) from busy
            log.info("repeating a request in_s=%.1f cause=%s", PAUSES_S[failures], busy)
            time.sleep(PAUSES_S[failures])
            failures += 1


def refusal(where: str, status: int, remedies: Mapping[int, str]) -> BadInput | ExecutorError:
    """The error that an HTTP status stands for: BadInput with its remedy, Busy, or another ExecutorError."""
    if status in remedies:
        return BadInput(f"{where}: {remedies[status]}")
    return Busy(where) if status in (408, 429) or status >= 500 else ExecutorError(where)


def first_line(text: str) -> str:
    """The first line of a service's words that isn't empty, without colors and its full stop."""
    plain = _ESCAPE.sub("", text)
    return next((line.strip().rstrip(".") for line in plain.splitlines() if line.strip()), "without a word")[:500]
