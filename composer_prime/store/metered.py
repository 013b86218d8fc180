"""Stores around another: one counts what passes, for a site's summary and tape; one limits it, on a shared link.

Large reads come in pieces, each when its time has come. A write is one request in every store, so it goes out as fast
as the link takes it, and the next one waits until the average is right again. Small writes, records and beats, never
wait: a site that is late with a beat counts as gone.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from composer_prime.store.base import Store

BYTES_PER_MBIT = 125_000
SMALL_BYTES = 64 * 1024
"""Up to this size a write goes at once; it is counted all the same."""
PIECE_BYTES = 2**18
"""Read at a time where reads are limited."""
BURST_S = 1.0
"""What was not used is kept for so long."""
TIMER_S = 0.001
"""No shorter time is waited for."""
FIRST_PIECE_S = 2.0
"""How many seconds' bytes may be owed when a read begins: most reads are of records, which shouldn't be late."""


@dataclass(frozen=True)
class Traffic:
    """Bytes and requests since the store was opened."""

    bytes_up: int = 0
    bytes_down: int = 0
    num_requests: int = 0


class MeteredStore:
    """A `Store` that passes every call to `inner` and counts the bytes each way. Thread-safe."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._counting = threading.Lock()
        self._traffic = Traffic()

    @property
    def uri(self) -> str:
        """The inner store's."""
        return self._inner.uri

    def traffic(self) -> Traffic:
        """What has passed so far."""
        return self._traffic

    def _count(self, up: int = 0, down: int = 0) -> None:
        with self._counting:
            was = self._traffic
            self._traffic = Traffic(was.bytes_up + up, was.bytes_down + down, was.num_requests + 1)

    def create(self, key: str, data: bytes) -> bool:
        self._count(up=len(data))
        return self._inner.create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._count(up=len(data))
        self._inner.put(key, data)

    def get(self, key: str) -> bytes:
        data = self._inner.get(key)
        self._count(down=len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._inner.get_range(key, start, length)
        self._count(down=len(data))
        return data

    def list(self, prefix: str) -> list[str]:
        self._count()
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._count()
        self._inner.delete(key)

    def close(self) -> None:
        self._inner.close()


class TokenBucket:
    """Bytes that may pass, filled at a rate. What has passed already may make it negative. Thread-safe."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._level = bytes_per_s * BURST_S
        self._filled_at = clock()

    def take(self, num_bytes: int) -> None:
        """Take these bytes out, and return without waiting."""
        with self._lock:
            self._fill()
            self._level -= num_bytes

    def wait(self, owing_s: float = 0.0) -> None:
        """Return once no more is owed than passes in `owing_s` seconds; several who wait are let go together."""
        while True:
            with self._lock:
                self._fill()
                left_s = -self._level / self._rate - owing_s
            if left_s <= TIMER_S:
                return
            self._sleep(left_s)

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._rate * BURST_S, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now


class ThrottledStore(MeteredStore):
    """A `Store` that passes every call to `inner`, at most at a bucket's rate each way on average. Thread-safe."""

    def __init__(self, inner: Store, up: TokenBucket | None = None, down: TokenBucket | None = None) -> None:
        super().__init__(inner)
        self._up, self._down = up, down

    def create(self, key: str, data: bytes) -> bool:
        self._pass_up(len(data))
        return super().create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._pass_up(len(data))
        super().put(key, data)

    def _pass_up(self, num_bytes: int) -> None:
        if self._up is None:
            return
        if num_bytes > SMALL_BYTES:
            self._up.wait()
        self._up.take(num_bytes)

    def get(self, key: str) -> bytes:
        """As `Store.get`. One of more than PIECE_BYTES must not be overwritten meanwhile; none of a run's is."""
        return super().get(key) if self._down is None else self.get_range(key, 0, 2**62)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if self._down is None:
            return super().get_range(key, start, length)
        pieces: list[bytes] = []
        while True:
            wanted = min(PIECE_BYTES, length)
            self._down.wait(0.0 if start else FIRST_PIECE_S)
            pieces.append(super().get_range(key, start, wanted))
            self._down.take(len(pieces[-1]))
            start, length = start + wanted, length - wanted
            if not length or len(pieces[-1]) < wanted:
                return b"".join(pieces)


def throttle(store: Store, mbit_up: float | None, mbit_down: float | None) -> Store:
    """The store, limited to so many Mbit/s up and down; itself where neither is given."""
    if mbit_up is None and mbit_down is None:
        return store
    up, down = (None if mbit is None else TokenBucket(mbit * BYTES_PER_MBIT) for mbit in (mbit_up, mbit_down))
    return ThrottledStore(store, up, down)
