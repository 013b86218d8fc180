"""A store that fails on purpose, by a seeded plan: for tests, simulations and dress rehearsals.

Faults are those that a sound object store, seen over a bad network, may show: lost requests, lost answers, transfers
that break midway, latency and late listings. Reads that lag behind writes are no such fault, and never happen.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from composer_prime.errors import StoreError
from composer_prime.store.base import Store

T = TypeVar("T")

_WRITES = ("create", "put", "delete")


@dataclass(frozen=True)
class FaultPlan:
    """Which faults happen, and how often. Probabilities are per operation; the empty plan does nothing.

    error_before   the operation fails and nothing happened.
    error_after    the operation took place, and its answer is lost: the caller sees a failure.
    torn           the operation breaks midway, after part of its latency, and the caller sees a failure: a read gives
                   no byte; a write has happened whole or not at all, as the seed has it. No store keeps half of it.
    own_retry      a create's answer is lost and the client sends it again, so that it meets its own first try.
    latency        the operation waits up to `latency_s` seconds before it acts.
    stale_list     a list misses keys first written within the last `stale_operations` operations.
    """

    seed: int = 0
    error_before: float = 0.0
    error_after: float = 0.0
    torn: float = 0.0
    own_retry: float = 0.0
    latency: float = 0.0
    latency_s: float = 0.1
    stale_list: float = 0.0
    stale_operations: int = 10


@dataclass
class WriteLog:
    """The recent writes of one bucket. Sites that share it see each other's writes late, not only their own."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    num_operations: int = 0
    born: dict[str, int] = field(default_factory=dict)
    """By key that came to be under our eyes: after how many operations."""


@dataclass(frozen=True)
class _Draw:
    """What the dice say of one operation."""

    number: int
    error_before: bool
    error_after: bool
    is_torn: bool
    torn_lands: bool
    own_retry: bool
    latency_s: float
    stale_list: bool


class FaultyStore(Store):
    """A `Store` that passes every call to `inner`, except as `plan` has it.

    Every operation draws the same number of values from one generator, so that the same calls in the same order meet
    the same faults; threads that race for it change the order.
    """

    def __init__(
        self,
        inner: Store,
        plan: FaultPlan,
        *,
        sleep: Callable[[float], object] = time.sleep,
        writes: WriteLog | None = None,
    ) -> None:
        """`sleep` may be virtual; `writes` may be shared by the stores of several sites."""
        self._inner = inner
        self._plan = plan
        self._sleep = sleep
        self._log = writes or WriteLog()
        self._random = random.Random(plan.seed)
        self._lock = threading.Lock()
        self._num_drawn = 0

    @property
    def uri(self) -> str:
        """The inner store's."""
        return self._inner.uri

    def create(self, key: str, data: bytes) -> bool:
        def act(draw: _Draw) -> bool:
            won = self._written(key, lambda: self._inner.create(key, data))
            return self._inner.create(key, data) if draw.own_retry else won

        return self._faulty("create", key, act)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._faulty("put", key, lambda draw: self._written(key, lambda: self._inner.put(key, data)))

    def get(self, key: str) -> bytes:
        return self._faulty("get", key, lambda draw: self._inner.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._faulty("get", key, lambda draw: self._inner.get_range(key, start, length))

    def list(self, prefix: str) -> list[str]:
        def act(draw: _Draw) -> list[str]:
            listed = self._inner.list(prefix)
            return [key for key in listed if not self._is_new(key)] if draw.stale_list else listed

        return self._faulty("list", prefix, act)

    def delete(self, key: str) -> None:
        def act(draw: _Draw) -> None:
            self._inner.delete(key)
            with self._log.lock:
                self._log.born.pop(key, None)

        self._faulty("delete", key, act)

    def close(self) -> None:
        self._inner.close()

    def _faulty(self, act: str, key: str, do: Callable[[_Draw], T]) -> T:
        draw = self._draw()
        if draw.latency_s:
            self._sleep(draw.latency_s)
        with self._log.lock:
            self._log.num_operations += 1
        what = (
            f"{act} of {key or 'all keys'} in {self.uri} failed: planned fault {draw.number} of seed {self._plan.seed}"
        )
        if draw.error_before:
            raise StoreError(f"{what}, before it acted: try again")
        if draw.is_torn:
            if draw.torn_lands and act in _WRITES:
                do(draw)
            raise StoreError(f"{what}, midway: try again")
        done = do(draw)
        if draw.error_after:
            raise StoreError(f"{what}, after it acted: try again")
        return done

    def _draw(self) -> _Draw:
        plan = self._plan
        with self._lock:
            self._num_drawn += 1
            chances = (plan.error_before, plan.error_after, plan.own_retry, plan.stale_list)
            before, after, own_retry, stale_list = (self._random.random() < chance for chance in chances)
            is_slow, share = self._random.random() < plan.latency, self._random.random()
            is_torn, torn_at = self._random.random() < plan.torn, self._random.random()
            latency_s = (share * plan.latency_s if is_slow else 0.0) * (torn_at if is_torn else 1.0)
            return _Draw(
                number=self._num_drawn,
                error_before=before,
                error_after=after,
                is_torn=is_torn,
                torn_lands=self._random.random() < 0.5,
                own_retry=own_retry,
                latency_s=latency_s,
                stale_list=stale_list,
            )

    def _written(self, key: str, write: Callable[[], T]) -> T:
        """Do a write and note when its key came to be, as far as the plan needs it."""
        is_new = bool(self._plan.stale_list) and key not in self._inner.list(key)
        done = write()
        if isinstance(done, bool) and not done:  # a create that lost wrote nothing
            return done
        if is_new:
            with self._log.lock:
                self._log.born[key] = self._log.num_operations
        return done

    def _is_new(self, key: str) -> bool:
        with self._log.lock:
            born = self._log.born.get(key)
            return born is not None and self._log.num_operations - born <= self._plan.stale_operations
