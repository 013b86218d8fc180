"""How much one site, and all sites together, may ask of a gateway: token buckets, each refilled at a steady rate.

Each gateway counts for itself: behind n of them a site has n times the rate.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """Tokens a second, and how many may be saved up."""

    per_s: float
    burst: float


@dataclass(frozen=True)
class Rates:
    """Requests of one site, requests of all, and bytes of records of one site: nothing else bounds its tape."""

    site: Rate = Rate(50, 200)
    gateway: Rate = Rate(500, 1000)
    record_bytes: Rate = Rate(2**16, 2**23)


class Limits:
    """The buckets of one gateway, full at first. Thread-safe. Sites come from the run's admissions."""

    def __init__(self, rates: Rates, clock: Callable[[], float] = time.monotonic) -> None:
        self._rates = rates
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}
        """By kind and site: tokens, and when they were counted."""

    def request(self, site: str) -> int:
        """Count one request of a site; 0, or the whole seconds after which it may come again."""
        return self._take("requests", site, self._rates.site, 1) or self._take("requests", "", self._rates.gateway, 1)

    def owe(self, site: str, num_requests: int) -> None:
        """Count an answer of a site's that cost as much as so many requests more; what was done can't be refused."""
        self._take("requests", site, self._rates.site, num_requests, may_owe=True)
        self._take("requests", "", self._rates.gateway, num_requests, may_owe=True)

    def record(self, site: str, nbytes: int) -> int:
        """Count the bytes of a record that a site writes; as `request`."""
        return self._take("bytes", site, self._rates.record_bytes, nbytes)

    def _take(self, kind: str, site: str, rate: Rate, cost: float, *, may_owe: bool = False) -> int:
        """Take so many tokens, at most a full bucket's; 0, or the seconds after which they are there."""
        cost, now = min(cost, rate.burst), self._clock()
        with self._lock:
            tokens, at = self._buckets.get((kind, site), (rate.burst, now))
            tokens = min(rate.burst, tokens + (now - at) * rate.per_s)
            missing = 0.0 if may_owe else max(0.0, cost - tokens)
            self._buckets[kind, site] = (tokens if missing else max(tokens - cost, -rate.burst)), now
            return math.ceil(missing / rate.per_s)
