"""Bytes that a site moves through the bucket, counted from the codec and the fragments, and their time over a link.

Records of a round come on top: some kilobytes a fragment and site. How fast the way to the bucket is here, objects
of growing size tell, sent and fetched, and deleted again; proxies named by the environment are used, as in training.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from composer_prime.errors import StoreError
from composer_prime.outer.fragments import NamedShape, plan_fragments
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.terms import Terms

BITS_PER_MBIT = 1e6
FIRST_BYTES, GROWTH, MOST_BYTES = 2**16, 4, 2**22
"""Sizes tried: all together move a third more than the largest, each way."""
LONG_ENOUGH_S, MANY_DELAYS = 0.2, 4
"""A transfer that takes so long, and so many times a small request's delay, tells the rate; shorter ones the delay."""


@dataclass(frozen=True)
class Traffic:
    """What one site moves.

    up_bytes, down_bytes   payloads and merged parts of a round of all fragments, at the site that moves most
    join_bytes             masters that a joiner fetches, at most: stored ones are packed, by how much isn't known
    """

    up_bytes: int
    down_bytes: int
    join_bytes: int


def seconds(nbytes: int, mbit: float) -> float:
    """Bytes by bandwidth: nothing is faster."""
    return 8 * nbytes / (mbit * BITS_PER_MBIT)


def fragment_sizes(terms: Terms, shapes: Sequence[NamedShape]) -> list[int]:
    """Parameters of each fragment."""
    return [fragment.numel for fragment in plan_fragments(list(shapes), terms.fragments)]


def traffic(terms: Terms, numels: Sequence[int], num_sites: int, codec: str = "") -> Traffic:
    """What a site of `num_sites` moves; numels: parameters of each fragment; codec: instead of the terms' own.

    Up to `gather_sites` sites everyone reads everyone's payload; beyond, each merges a part of a round, and reads all
    merged parts. A payload of one slice can't be cut.
    """
    from composer_prime.outer.codecs import get_codec
    from composer_prime.outer.payloads import plan_slices

    coder, merger = get_codec(codec or terms.codec), get_codec("int8")
    up = down = 0
    for numel in numels:
        plan = plan_slices(numel, terms.slices, (coder, merger))
        sizes = [plan.size(index) for index in range(plan.num_slices)]
        payload, merged = (sum(each.nbytes(size) for size in sizes) for each in (coder, merger))
        if num_sites <= terms.gather_sites or plan.num_slices == 1:
            up, down = up + payload, down + (num_sites - 1) * payload
            continue
        parts = min(num_sites, plan.num_slices)
        up += payload + math.ceil(merged / parts)
        down += (num_sites - 1) * math.ceil(payload / parts) + merged
    return Traffic(up, down, terms.master_nbytes(sum(numels)))


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
        down = _mbit(lambda size: len(store.get_range(read, 0, size)), delay_s, clock) if read else None
        return Link(up, down, delay_s, problem)
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
