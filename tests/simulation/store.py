"""One bucket, and each site's way to it: requests take virtual time, and go wrong as a bad network makes them.

A request takes effect at an instant between its issue and its answer, so requests of all sites interleave one by one,
and one that is under way may still take effect after its process has died. No list is stale: a store whose lists lack
what was written before isn't one that the protocol asks for (docs/protocol.md).
"""

import random
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import GreenletExit

from composer_prime.errors import KeyMissing, StoreError
from composer_prime.outer.master_header import HEADER_BYTES
from composer_prime.store.base import Store
from tests.simulation.runtime import Process

OVERWRITTEN = "/beat"
"""The end of the only keys that are written twice."""
LAST = chr(0x10FFFF)
"""Sorts after all that keys hold."""


class Bucket:
    """The objects of all sites, and every content that a create-once key ever served."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.history: dict[str, list[bytes]] = {}
        """All bytes that ever stood at a key, oldest first, beats left out."""
        self.on_write: Callable[[str, bytes], None] = lambda key, data: None
        self.on_delete: Callable[[str, Process], None] = lambda key, process: None
        self.on_beat: Callable[[bytes], None] = lambda data: None
        self.writers: dict[str, set[Process]] = {}
        """Who put what: payloads, masters and beats."""
        self.collected: set[str] = set()
        """Keys that were deleted as garbage."""
        self.damaged: set[str] = set()
        """Payloads that once arrived otherwise than they were sent."""
        self._keys: list[str] = []

    def create(self, key: str, data: bytes) -> bool:
        standing = self.objects.get(key)
        if standing is not None:
            return standing == data
        self._set(key, data)
        return True

    def put(self, key: str, data: bytes | memoryview, writer: Process, damage: int | None = None) -> None:
        """damage   draws what becomes of the bytes: none are there, a bit flips, or the last one is missing"""
        self.writers.setdefault(key, set()).add(writer)
        self._set(key, bytes(data))
        if damage is None:
            return
        self.damaged.add(key)
        if damage % 3 == 0:
            del self.objects[key]
            del self._keys[bisect_left(self._keys, key)]
        elif damage % 3 == 1:
            flipped = bytearray(data)
            flipped[damage % len(flipped)] ^= 1
            self.objects[key] = bytes(flipped)
        else:
            self.objects[key] = bytes(data)[:-1]

    def _set(self, key: str, data: bytes) -> None:
        if key not in self.objects:
            insort(self._keys, key)
        self.objects[key] = data
        if key.endswith(OVERWRITTEN):
            self.on_beat(data)
        else:
            known = self.history.setdefault(key, [])
            if not known or known[-1] != data:
                known.append(data)
                self.on_write(key, data)

    def list(self, prefix: str) -> list[str]:
        keys = self._keys
        return keys[bisect_left(keys, prefix) : bisect_left(keys, prefix + LAST)]

    def delete(self, key: str, process: Process) -> None:
        if key in self.objects:
            del self.objects[key]
            del self._keys[bisect_left(self._keys, key)]
            self.collected.add(key)
            self.on_delete(key, process)


@dataclass
class Link:
    """One site's way to the bucket, as faults change it. Times in virtual seconds.

    latency_s      of a request, on average
    upload_s       more, for each payload or master
    master_s       more, to read a whole master, on average
    factor         of both, while the link is slow
    num_cuts       faults that let nothing through, just now
    loss           probability that a request is lost, or its answer, or that it is sent twice
    unreadable     probability that payloads can't be read, while all else can
    damage         draws how payloads that are put arrive damaged; None: they arrive as they were sent
    slow_until     when the last request ends that began while the link was slow: it stays as slow as it began
    """

    latency_s: float = 0.03
    upload_s: float = 0.1
    master_s: float = 0.0
    factor: float = 1.0
    num_cuts: int = 0
    loss: float = 0.0
    unreadable: float = 0.0
    damage: int | None = None
    slow_until: float = 0.0
    hits: dict[str, int] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether no fault changes it just now."""
        return not (self.num_cuts or self.loss or self.unreadable or self.damage is not None) and self.factor == 1

    def count(self, what: str) -> None:
        self.hits[what] = self.hits.get(what, 0) + 1


class SimStore(Store):
    """The store of one process."""

    uri = "sim://bucket"

    def __init__(
        self, bucket: Bucket, process: Process, link: Link, rng: random.Random, log: list[tuple[Any, ...]] | None
    ) -> None:
        self._bucket = bucket
        self._process = process
        self._scheduler = process.scheduler
        self._link = link
        self._rng = rng
        self._log = log
        self.before_request: Callable[[], None] = lambda: None

    # --- the store's methods ----------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> bool:
        return self._write("create", key, lambda: self._bucket.create(key, data))

    def put(self, key: str, data: bytes | memoryview) -> None:
        damage = self._link.damage if "/payload/" in key else None
        self._write("put", key, lambda: self._bucket.put(key, data, self._process, damage))

    def delete(self, key: str) -> None:
        self._write("delete", key, lambda: self._bucket.delete(key, self._process))

    def get(self, key: str) -> bytes:
        self._read("get", key)
        data = self._bucket.objects.get(key)
        if data is None:
            raise KeyMissing(f"no object at {key} in {self.uri}")
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length > HEADER_BYTES and self._link.master_s and key.startswith("masters/"):
            self._sleep(self._link.master_s * 2 * self._rng.random())
        data = self.get(key)
        return data if start == 0 and length >= len(data) else data[start : start + length]

    def list(self, prefix: str) -> list[str]:
        self._read("list", prefix)
        return self._bucket.list(prefix)

    def close(self) -> None:
        """Nothing to let go of."""

    # --- time and faults --------------------------------------------------------------------------------------------

    def _delay(self, op: str, key: str) -> float:
        link = self._link
        delay = link.latency_s * (0.5 + self._rng.random())
        if link.upload_s and op == "put" and ("/payload/" in key or key.startswith("masters/")):
            delay += link.upload_s * (0.7 + 0.6 * self._rng.random())
        return self._as_slow_as_now(delay)

    def _as_slow_as_now(self, seconds: float) -> float:
        link = self._link
        if link.factor != 1:
            seconds *= link.factor
            link.slow_until = max(link.slow_until, self._scheduler.time + seconds)
        return seconds

    def _read(self, op: str, key: str) -> None:
        """Wait until the instant at which the read takes effect, which is that of its answer."""
        self.before_request()
        link, process, scheduler = self._link, self._process, self._scheduler
        if process.is_dead:
            raise GreenletExit
        if link.num_cuts or (link.loss and self._rng.random() < link.loss):
            self._fail(op, key, "lost")
        if link.unreadable and ("/payload/" in key or "/merged/" in key) and self._rng.random() < link.unreadable:
            self._fail(op, key, "payload unreadable")
        scheduler.sleep(self._as_slow_as_now(link.latency_s * (0.5 + self._rng.random())))
        if link.num_cuts:
            self._fail(op, key, "cut")
        scheduler.num_events += 1
        scheduler.num_reads += 1
        if self._log is not None:
            self._log.append((scheduler.time, process.name, op, key))

    def _write(self, op: str, key: str, effect: Callable[[], Any]) -> Any:
        """Let the write take effect, whatever becomes of its process meanwhile, and wait for the answer."""
        self.before_request()
        link, process, rng = self._link, self._process, self._rng
        if process.is_dead:
            raise GreenletExit
        scheduler = self._scheduler
        fate = rng.random() / link.loss if link.loss else 1.0
        if link.num_cuts or fate < 0.25:
            self._fail(op, key, "lost")
        delay = self._delay(op, key)
        result: list[Any] = []

        def act() -> None:
            if link.num_cuts and fate > 0.5:
                return
            scheduler.num_events += 1
            scheduler.num_writes += 1
            result.append(effect())
            if self._log is not None:
                self._log.append((scheduler.time, process.name, op, key, result[-1]))

        if fate < 0.5:  # it takes effect once nobody waits for it any more
            scheduler.call_at(scheduler.time + delay + 3 * rng.random(), act)
            self._fail(op, key, "answer lost")
        scheduler.call_at(scheduler.time + delay * 0.7, act)
        self._sleep(delay)
        if link.num_cuts or not result or fate < 0.75:
            self._fail(op, key, "answer lost")
        if fate < 1.0:  # sent again: it meets its own first try
            link.count("repeated")
            self._sleep(self._delay(op, key))
            act()
            if not result or link.num_cuts:
                self._fail(op, key, "answer lost")
        return result[-1]

    def _sleep(self, seconds: float) -> None:
        if self._process.is_dead:
            raise GreenletExit
        self._scheduler.sleep(seconds)

    def _fail(self, op: str, key: str, how: str) -> None:
        self._link.count(how)
        self._sleep(0.2 + 2 * self._rng.random())
        self._scheduler.num_events += 1
        self._scheduler.num_failed += 1
        if self._log is not None:
            self._log.append((self._scheduler.time, self._process.name, op, key, how))
        raise StoreError(f"{op} of {key} in {self.uri} failed: {how}")


class Desk(Store):
    """The store of the owner, whose commands take no time and never fail."""

    uri = SimStore.uri

    def __init__(self, bucket: Bucket, process: Process) -> None:
        self._bucket = bucket
        self._process = process

    def create(self, key: str, data: bytes) -> bool:
        return self._bucket.create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._bucket.put(key, data, self._process)

    def get(self, key: str) -> bytes:
        if key not in self._bucket.objects:
            raise KeyMissing(f"no object at {key} in {self.uri}")
        return self._bucket.objects[key]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def list(self, prefix: str) -> list[str]:
        return self._bucket.list(prefix)

    def delete(self, key: str) -> None:
        self._bucket.delete(key, self._process)

    def close(self) -> None:
        """Nothing to let go of."""
