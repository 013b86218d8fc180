"""Several transfers at once, on threads that the caller owns: a bounded number under way, results in order."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import TypeVar

from composer_prime.errors import KeyMissing
from composer_prime.store.base import Store

T = TypeVar("T")
R = TypeVar("R")


def map_bounded(executor: Executor, fn: Callable[[T], R], items: Iterable[T], limit: int) -> list[R]:
    """`[fn(item) for item in items]`, on the executor's threads, with at most `limit` calls under way.

    After a call has failed no new one is started; when all have ended, the failure of the earliest item is raised.
    Items are drawn as calls end, so that a generator of large bytes holds few of them. Don't call it from a task of
    the same executor: the executor may have no thread left.
    """
    if limit < 1:
        raise ValueError(f"limit ({limit}) must be 1 or more")
    remaining = iter(items)
    calls: list[Future[R]] = []
    under_way: set[Future[R]] = set()
    has_failed = False
    try:
        for item in remaining:
            calls.append(executor.submit(fn, item))
            under_way.add(calls[-1])
            while len(under_way) >= limit and not has_failed:
                ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                has_failed = any(call.exception() is not None for call in ended)
            if has_failed:
                break
    finally:
        wait(calls)
    return [call.result() for call in calls]


def get_many(store: Store, keys: Iterable[str], executor: Executor, limit: int) -> list[bytes | None]:
    """The bytes at each key, in order, None where there is no object; StoreError as `map_bounded` raises it."""

    def get(key: str) -> bytes | None:
        try:
            return store.get(key)
        except KeyMissing:
            return None

    return map_bounded(executor, get, keys, limit)
