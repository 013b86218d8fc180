"""A store around another that counts what passes, for a site's summary and tape, and limits it on a shared link.

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


class TokenBucket:
    """Bytes that may pass, at a rate on average. What has passed already may be owed. Thread-safe."""

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
        self._even_at = clock() - BURST_S
        """When nothing is owed any more."""

    def take(self, num_bytes: int) -> None:
        """Take these bytes out, and return without waiting."""
        with self._lock:
            self._even_at = max(self._even_at, self._clock() - BURST_S) + num_bytes / self._rate

    def wait(self, owing_s: float = 0.0) -> None:
        """Return once no more is owed than passes in `owing_s` seconds; several who wait are let go together."""
        while (left_s := self._even_at - self._clock() - owing_s) > TIMER_S:
            self._sleep(left_s)


@dataclass(frozen=True)
class Traffic:
    """Bytes and requests since the store was opened."""

    bytes_up: int = 0
    bytes_down: int = 0
    num_requests: int = 0


class MeteredStore(Store):
    """A `Store` that passes every call to `inner` and counts the bytes each way. Thread-safe."""

    def __init__(self, inner: Store, up: TokenBucket | None = None, down: TokenBucket | None = None) -> None:
        """up, down   what limits the bytes each way; None: nothing"""
        self.uri = inner.uri
        self._inner = inner
        self._up, self._down = up, down
        self._counting = threading.Lock()
        self._traffic = Traffic()

    def traffic(self) -> Traffic:
        """What has passed so far."""
        return self._traffic

    def _count(self, up: int = 0, down: int = 0) -> None:
        with self._counting:
            was = self._traffic
            self._traffic = Traffic(was.bytes_up + up, was.bytes_down + down, was.num_requests + 1)

    def _count_up(self, num_bytes: int) -> None:
        """Count a write, once it may begin."""
        if self._up is not None:
            if num_bytes > SMALL_BYTES:
                self._up.wait()
            self._up.take(num_bytes)
        self._count(up=num_bytes)

    def create(self, key: str, data: bytes) -> bool:
        self._count_up(len(data))
        return self._inner.create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._count_up(len(data))
        self._inner.put(key, data)

    def get(self, key: str) -> bytes:
        """As `Store.get`. If reads are limited, nobody may overwrite a large object meanwhile; none of a run's is."""
        if self._down is not None:
            return self.get_range(key, 0, 2**62)
        data = self._inner.get(key)
        self._count(down=len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        pieces: list[bytes] = []
        while True:
            wanted = length if self._down is None else min(PIECE_BYTES, length)
            if self._down is not None:
                self._down.wait(0.0 if start else FIRST_PIECE_S)
            pieces.append(self._inner.get_range(key, start, wanted))
            self._count(down=len(pieces[-1]))
            if self._down is not None:
                self._down.take(len(pieces[-1]))
            start, length = start + wanted, length - wanted
            if length <= 0 or len(pieces[-1]) < wanted:
                return b"".join(pieces)

    def list(self, prefix: str) -> list[str]:
        self._count()
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._count()
        self._inner.delete(key)

    def close(self) -> None:
        self._inner.close()


def throttle(store: Store, mbit_up: float | None, mbit_down: float | None) -> Store:
    """The store, limited to so many Mbit/s up and down; itself where neither is given."""
    if mbit_up is None and mbit_down is None:
        return store
    up, down = (None if mbit is None else TokenBucket(mbit * BYTES_PER_MBIT) for mbit in (mbit_up, mbit_down))
    return MeteredStore(store, up, down)
