"""How fast this machine's way to the bucket is: objects of growing size, sent and fetched, and deleted again.

Proxies named by the environment are used, as they will be when training.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from composer_prime.errors import StoreError
from composer_prime.plan.traffic import BITS_PER_MBIT
from composer_prime.store import keys
from composer_prime.store.base import Store

FIRST_BYTES, GROWTH, MOST_BYTES = 2**16, 4, 2**22
"""Sizes tried: all together move a third more than the largest, each way."""
LONG_ENOUGH_S, MANY_DELAYS = 0.2, 4
"""A transfer that takes so long, and so many times a small request's delay, tells the rate; shorter ones the delay."""


@dataclass(frozen=True)
class Link:
    """The way to the bucket.

    up_mbit, down_mbit   Mbit/s; None: not measured. `problem` says why nothing was sent
    delay_s              of a small request
    up_cap, down_cap     Mbit/s that the site may use; None: all
    """

    up_mbit: float | None
    down_mbit: float | None
    delay_s: float
    problem: str = ""
    up_cap: float | None = None
    down_cap: float | None = None

    @property
    def usable(self) -> tuple[float | None, float | None]:
        """Mbit/s (up, down) that a site has here: what was measured, and no more than it may use."""
        return _least(self.up_mbit, self.up_cap), _least(self.down_mbit, self.down_cap)


def _least(measured: float | None, cap: float | None) -> float | None:
    return measured if measured is None or cap is None else min(measured, cap)


def measure(store: Store, site: str | None = None, *, clock: Callable[[], float] = time.perf_counter) -> Link:
    """Send and fetch below the store's place for trials: the site's own, where it is named.

    Raises StoreUnusable when the store can't be reached. One that takes no trials is only read from; behind a gateway
    none is tried, since a guest there deletes nothing.
    """
    store.list(keys.manifest())  # connects
    began = clock()
    store.list(keys.manifest())
    delay_s = clock() - began

    def send(size: int) -> int:
        store.put(key, os.urandom(size))
        return size

    def fetch(size: int) -> int:
        return len(store.get_range(read, 0, size))

    key = keys.probe(f"doctor-{os.urandom(8).hex()}", site)
    up, problem, read = None, "behind a gateway nothing is written to try it", ""
    if not store.is_guarded:
        try:
            up, problem, read = _mbit(send, delay_s, clock), "", key
        except StoreError as error:
            problem = str(error)
    if problem:
        read = next((each for each in reversed(store.list(keys.masters_prefix(0))) if keys.is_master(each)), "")
    try:
        return Link(up, _mbit(fetch, delay_s, clock) if read else None, delay_s, problem)
    finally:
        if not store.is_guarded:
            with suppress(StoreError):
                store.delete(key)


def _mbit(move: Callable[[int], int], delay_s: float, clock: Callable[[], float]) -> float | None:
    """The rate without the delay, as far as that was less than half of the time; None where there is too little.

    move   sends or fetches so many bytes, and says how many there were
    """
    size = FIRST_BYTES
    while True:
        began = clock()
        moved = move(size)
        seconds = max(clock() - began, 1e-6)
        if moved < size or size >= MOST_BYTES or seconds >= max(LONG_ENOUGH_S, MANY_DELAYS * delay_s):
            rate = 8 * moved / max(seconds - delay_s, seconds / 2) / BITS_PER_MBIT
            return rate if moved >= FIRST_BYTES else None
        size *= GROWTH
