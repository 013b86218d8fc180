"""How fast this machine's way to the bucket is, and how far its clock is off.

Bytes are random, their number is bounded, and the object they make is deleted again. Proxies named by the environment
are used, as they will be when training.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx

from composer_prime.errors import StoreError
from composer_prime.store import keys
from composer_prime.store.base import Guarded, Store
from composer_prime.store.throttled import BYTES_PER_MBIT

FIRST_BYTES = 2**16
GROWTH = 4
MOST_BYTES = 2**22
"""The largest object that is sent: all tries together move a third more, each way."""
LONG_ENOUGH_S, MANY_DELAYS = 0.2, 4
"""A transfer that takes so long, and so many times a small request's delay, tells the rate; shorter ones tell the
delay. Who joins waits for this."""
CLOCK_TIMEOUT_S = 5.0
GATEWAY = "gateway+"


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
    """Send and fetch objects of growing size, below the store's place for trials: the site's own, where it is named.

    Raises StoreUnusable when the store can't be reached. One that takes no trials is only read from; behind a gateway
    none is tried, since a guest there deletes nothing.
    """
    store.list(keys.manifest())  # connects
    began = clock()
    store.list(keys.manifest())
    delay_s = clock() - began
    if isinstance(store, Guarded):
        return Link(None, _fetch_only(store, delay_s, clock), delay_s, "behind a gateway nothing is written to try it")
    key = keys.probe(f"doctor-{os.urandom(8).hex()}", site)
    try:
        return _send_and_fetch(store, key, delay_s, clock)
    except StoreError as error:
        return Link(None, _fetch_only(store, delay_s, clock), delay_s, str(error))


def _send_and_fetch(store: Store, key: str, delay_s: float, clock: Callable[[], float]) -> Link:
    size = FIRST_BYTES
    try:
        while True:
            data = os.urandom(size)
            up_s = _seconds(lambda: store.put(key, data), clock)  # noqa: B023 (called at once)
            if _tells(up_s, delay_s) or size >= MOST_BYTES:
                break
            size *= GROWTH
        down_s = _seconds(lambda: store.get_range(key, 0, size), clock)
    finally:
        store.delete(key)
    return Link(_mbit(size, up_s, delay_s), _mbit(size, down_s, delay_s), delay_s)


def _fetch_only(store: Store, delay_s: float, clock: Callable[[], float]) -> float | None:
    """Mbit/s of reading the beginning of a stored master; None where none can be read."""
    masters = [key for key in store.list(keys.masters_prefix(0)) if keys.is_master(key)]
    if not masters:
        return None
    size, read = FIRST_BYTES, b""

    def fetch() -> None:
        nonlocal read
        read = store.get_range(masters[-1], 0, size)

    while True:
        seconds = _seconds(fetch, clock)
        if len(read) < size or _tells(seconds, delay_s) or size >= MOST_BYTES:
            return _mbit(len(read), seconds, delay_s) if len(read) >= FIRST_BYTES else None
        size *= GROWTH


def _seconds(act: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    act()
    return max(clock() - began, 1e-6)


def _tells(seconds: float, delay_s: float) -> bool:
    return seconds >= max(LONG_ENOUGH_S, MANY_DELAYS * delay_s)


def _mbit(num_bytes: int, seconds: float, delay_s: float) -> float:
    """The rate without the delay, as far as that was less than half of the time."""
    return num_bytes / max(seconds - delay_s, seconds / 2) / BYTES_PER_MBIT


def endpoint_of(uri: str) -> str | None:
    """A URL at which the server behind a store tells its time; None for a store that has none."""
    scheme, _, rest = uri.partition("://")
    if scheme.startswith(GATEWAY):
        return f"{scheme.removeprefix(GATEWAY)}://{rest.rstrip('/').rpartition('/')[0]}/health"
    if scheme == "s3":
        named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return named or "https://s3.amazonaws.com"
    return {"gs": "https://storage.googleapis.com", "hf": "https://s3.hf.co"}.get(scheme)


def clock_ahead_s(endpoint: str) -> float | None:
    """Seconds by which this machine's clock is ahead of that server's, to a second; None when it doesn't say."""
    try:
        answer = httpx.head(endpoint, timeout=CLOCK_TIMEOUT_S)
        told = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (httpx.HTTPError, KeyError, ValueError):
        return None
    return time.time() - told
