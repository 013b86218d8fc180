"""How much one site, and all sites together, may ask of a gateway: token buckets, each refilled at a steady rate.

Each gateway counts for itself: behind n of them a site has n times the rate.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rate:
    """Tokens a second, and how many may be saved up."""

    per_s: float
    burst: float


class TokenBucket:
    """One bucket, full at first. Thread-safe."""

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = rate.burst
        self._at = clock()

    def take(self, cost: float = 1.0) -> int:
        """Take so many tokens, at most a full bucket's; 0, or the whole seconds after which they are there."""
        cost = min(cost, self._rate.burst)
        with self._lock:
            now = self._clock()
            self._tokens = min(self._rate.burst, self._tokens + (now - self._at) * self._rate.per_s)
            self._at = now
            if self._tokens >= cost:
                self._tokens -= cost
                return 0
            return math.ceil((cost - self._tokens) / self._rate.per_s)

    def owe(self, cost: float) -> None:
        """Take so many tokens, there or not, so that later ones wait: what was done can't be refused any more."""
        with self._lock:
            self._tokens = max(self._tokens - cost, -self._rate.burst)


RECORD_BYTES = Rate(2**16, 2**23)
"""Bytes of records that one site may write: nothing else bounds how many pieces of a tape it makes."""


@dataclass(frozen=True)
class Rates:
    """Requests of one site, requests of all, and bytes of records of one site."""

    site: Rate = Rate(50, 200)
    gateway: Rate = Rate(500, 1000)
    record_bytes: Rate = RECORD_BYTES


@dataclass
class Limits:
    """The buckets of one gateway. Sites come from the run's admissions, so there are only so many."""

    rates: Rates = field(default_factory=Rates)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._gateway = TokenBucket(self.rates.gateway, self.clock)
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def request(self, site: str) -> int:
        """Count one request of a site; 0, or the seconds after which it may come again."""
        return self._bucket("requests", site, self.rates.site).take() or self._gateway.take()

    def owe(self, site: str, num_requests: int) -> None:
        """Count an answer of a site's that cost as much as so many requests more."""
        self._bucket("requests", site, self.rates.site).owe(num_requests)
        self._gateway.owe(num_requests)

    def record(self, site: str, nbytes: int) -> int:
        """Count the bytes of a record that a site writes; as `request`."""
        return self._bucket("bytes", site, self.rates.record_bytes).take(nbytes)

    def _bucket(self, kind: str, site: str, rate: Rate) -> TokenBucket:
        with self._lock:
            bucket = self._buckets.get((kind, site))
            if bucket is None:
                bucket = self._buckets[kind, site] = TokenBucket(rate, self.clock)
            return bucket
