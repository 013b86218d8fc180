"""How fast one server is asked: slower after each refusal for speed, a little faster with each answer.

A server that refuses may say for how long, in `Retry-After` or in its rate-limit headers. Many say nothing. Then the
rate that it answered at so far is the measure, and pauses double until it answers again.
"""

import asyncio
import email.utils
import math
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime

FIRST_PAUSE_S = 1.0
"""After a refusal for speed; doubled while nothing but refusals comes."""

LONGEST_PAUSE_S = 600.0
"""A server that wants a longer one, or refuses for so long, is asked no more."""

SLOWER, FASTER = 0.7, 1.02
"""Of the rate, by each run of refusals and by each answer."""

_STEP_S = 60.0
"""Longest sleep at once: a refusal meanwhile moves the end."""

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Pace:
    """When the next request may leave, by one clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate: float | None = None  # a second; None: as many as there are
        self._next = clock()
        self._round = -math.inf
        self._since: float | None = None
        self._num_answers = 0
        self._pause_s = 0.0
        self._refused_since: float | None = None

    async def turn(self) -> float:
        """Wait until a request may leave; the moment when it does."""
        while (wait_s := self._next - self._clock()) > 0:
            await asyncio.sleep(min(wait_s, _STEP_S))
        now = self._clock()
        self._since = now if self._since is None else self._since
        self._next = now + (1 / self._rate if self._rate else 0.0)
        return now

    def answered(self, pause_s: float | None = None) -> None:
        """The server answered; `pause_s`: it said that this was the last one for so long."""
        self._num_answers += 1
        self._pause_s = 0.0
        self._refused_since = None
        if self._rate is not None:
            self._rate *= FASTER
        if pause_s is not None:
            self._hold(min(pause_s, LONGEST_PAUSE_S))

    def refused(self, left_at: float, pause_s: float | None = None) -> bool:
        """The server refused, for speed, a request that left at `left_at`; whether there is sense in another try."""
        now = self._clock()
        if self._refused_since is None:
            self._refused_since = now
        if left_at > self._round:  # those that left before it were refused for what came before it
            self._round = now
            if self._num_answers:
                seen = self._num_answers / max(now - (self._since or now), 1e-3)
                self._rate = SLOWER * min(seen, self._rate or seen)
                self._since, self._num_answers = now, 0
            self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            self._hold(self._pause_s)
        self._hold(pause_s or 0.0)
        return (pause_s or 0.0) <= LONGEST_PAUSE_S and now - self._refused_since <= LONGEST_PAUSE_S

    def _hold(self, pause_s: float) -> None:
        self._next = max(self._next, self._clock() + pause_s)


def asked_pause(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Seconds that a response asks us to wait: by Retry-After, else until a limit resets that has nothing left."""
    if (told := _seconds(headers.get("retry-after"), now)) is not None:
        return told
    resets = []
    for name, value in headers.items():
        name = name.lower()
        if "ratelimit-" in name and "remaining" in name and value.strip() == "0":
            resets.append(_seconds(headers.get(name.replace("remaining", "reset")), now))
    return max((one for one in resets if one is not None), default=None)


def _seconds(value: str | None, now: Callable[[], float]) -> float | None:
    """Of a header: seconds, "6m0s", a date, or a moment in Unix seconds or milliseconds; None where it says none."""
    if value is None:
        return None
    value = value.strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        seconds = float(value)
        if seconds > 1e11:
            seconds /= 1000
        return max(seconds - now(), 0.0) if seconds > 1e9 else seconds
    if _PART.match(value) and not _PART.sub("", value):
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(value))
    for read in (email.utils.parsedate_to_datetime, datetime.fromisoformat):
        try:
            return max(read(value).timestamp() - now(), 0.0)
        except ValueError:
            continue
    return None
