"""What the outer loop needs of the machine it runs on: time, threads, and waiting. No I/O is done here.

The loop never looks at a clock or starts a thread by itself, so the same code runs on threads in a site and in virtual
time in the simulation.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, TypeVar

A = TypeVar("A")
B = TypeVar("B")

PARALLEL_TRANSFERS = 16
"""Requests of one site that are under way at once, at most."""

PARALLEL_BODIES = 8
"""Longer works that are under way at once, at most: they need memory, too."""


class Condition(Protocol):
    """A lock with a waiting room, as `threading.Condition`; the lock may be taken again by its holder."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None, /
    ) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Let go of the lock until notified or `timeout` seconds have passed; False after a time-out."""
        ...

    def notify_all(self) -> None:
        """Wake all who wait."""
        ...


class Task(Protocol):
    """Something that runs beside the caller."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, `timeout` seconds at most."""
        ...

    def is_alive(self) -> bool:
        """Whether it still runs."""
        ...


class Runtime(Protocol):
    """Time, tasks and waiting. One for each site."""

    def now(self) -> float:
        """Seconds on a clock that only this process reads, never set back."""
        ...

    def lock(self) -> AbstractContextManager[object]:
        """A lock that its holder may take again."""
        ...

    def condition(self) -> Condition:
        """A condition of its own."""
        ...

    def spawn(self, name: str, body: Callable[[], None]) -> Task:
        """Run `body` beside the caller; the process doesn't wait for it at its end."""
        ...

    def map(self, function: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """function(item) of all items, several at once, in order. Raises the first error, once all have ended."""
        ...

    def close(self) -> None:
        """Let go of idle threads."""
        ...


def side_by_side(runtime: Runtime, name: str, bodies: Iterable[Callable[[], None]]) -> None:
    """Run bodies that use `runtime.map` themselves, several at once. Raises the first error, once all have ended.

    They run on tasks of their own, at most `PARALLEL_BODIES`: inside of `map` they would wait for its threads for ever.
    """
    waiting, lock = list(bodies)[::-1], runtime.lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors:
                with lock:
                    if not waiting:
                        return
                    body = waiting.pop()
                body()
        except BaseException as error:
            errors.append(error)

    for task in [runtime.spawn(name, work) for _ in range(min(len(waiting), PARALLEL_BODIES))]:
        task.join()
    if errors:
        raise errors[0]


class Room:
    """A context that so many tasks may be in at once; the others wait."""

    def __init__(self, runtime: Runtime, places: int) -> None:
        self._changed = runtime.condition()
        self._free = places

    def __enter__(self) -> None:
        with self._changed:
            while not self._free:
                self._changed.wait()
            self._free -= 1

    def __exit__(self, *raised: object) -> None:
        with self._changed:
            self._free += 1
            self._changed.notify_all()


class ThreadRuntime:
    """The runtime of a real site: threads and the monotonic clock."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()

    def now(self) -> float:
        return time.monotonic()

    def lock(self) -> AbstractContextManager[object]:
        return threading.RLock()

    def condition(self) -> Condition:
        return threading.Condition()

    def spawn(self, name: str, body: Callable[[], None]) -> Task:
        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread

    def map(self, function: Callable[[A], B], items: Iterable[A]) -> list[B]:
        listed = list(items)
        if len(listed) < 2:
            return [function(item) for item in listed]
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(PARALLEL_TRANSFERS, thread_name_prefix="outer-transfer")
        futures = [self._pool.submit(function, item) for item in listed]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def close(self) -> None:
        with self._pool_lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
