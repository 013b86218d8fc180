"""Bounded transfers keep the order, never exceed their limit, and raise only when nothing is under way any more."""

import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from composer_prime.errors import StoreError
from composer_prime.store.faulty import FaultPlan, FaultyStore
from composer_prime.store.memory import MemoryStore
from composer_prime.store.transfers import get_many, map_bounded


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def test_results_come_in_the_order_of_the_items(pool: ThreadPoolExecutor) -> None:
    turns = [threading.Event() for _ in range(4)]
    turns[3].set()

    def act(item: int) -> int:  # the last item ends first
        turns[item].wait()
        turns[item - 1].set()
        return item * item

    assert map_bounded(pool, act, range(4), limit=4) == [0, 1, 4, 9]
    assert map_bounded(pool, act, [], limit=1) == []


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_than_the_limit_are_under_way_and_the_limit_is_used(pool: ThreadPoolExecutor, limit: int) -> None:
    lock, under_way, most = threading.Lock(), 0, 0
    full = threading.Barrier(limit)

    def act(_: int) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        full.wait(timeout=20)
        with lock:
            under_way -= 1

    map_bounded(pool, act, range(4 * limit), limit=limit)
    assert most == limit


def test_failure_of_the_earliest_item_is_raised_after_all_have_ended(pool: ThreadPoolExecutor) -> None:
    started: list[int] = []
    ended: list[int] = []
    second_failed = threading.Event()

    def act(item: int) -> None:
        started.append(item)
        if item == 1:
            second_failed.set()
            raise StoreError("second")
        second_failed.wait()
        ended.append(item)
        if item == 0:
            raise StoreError("first")

    with pytest.raises(StoreError, match="first"):
        map_bounded(pool, act, range(100), limit=4)
    assert {0, 2, 3} <= set(ended)
    assert len(started) < 20, "nothing new starts after a failure"


def test_items_are_drawn_only_as_there_is_room(pool: ThreadPoolExecutor) -> None:
    drawn: list[int] = []
    done: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            drawn.append(item)
            assert len(drawn) - len(done) <= 3
            yield item

    map_bounded(pool, done.append, items(), limit=2)
    assert sorted(done) == list(range(20))


def test_failure_to_draw_an_item_waits_for_what_is_under_way(pool: ThreadPoolExecutor) -> None:
    done: list[int] = []

    def items() -> Iterator[int]:
        yield from (0, 1)
        raise StoreError("no more")

    with pytest.raises(StoreError, match="no more"):
        map_bounded(pool, done.append, items(), limit=5)
    assert sorted(done) == [0, 1]


def test_limit_below_one_is_refused(pool: ThreadPoolExecutor) -> None:
    with pytest.raises(ValueError, match=r"limit \(0\)"):
        map_bounded(pool, str, [1], limit=0)


def test_many_are_got_in_order_with_none_for_what_is_missing(pool: ThreadPoolExecutor) -> None:
    store = MemoryStore(secrets.token_hex(8))
    for number in range(0, 20, 2):
        store.put(f"k{number}", str(number).encode())
    got = get_many(store, [f"k{number}" for number in range(20)], pool, limit=3)
    assert got == [None if number % 2 else str(number).encode() for number in range(20)]


def test_store_that_fails_while_many_are_got_is_a_store_error(pool: ThreadPoolExecutor) -> None:
    store = FaultyStore(MemoryStore(secrets.token_hex(8)), FaultPlan(error_before=1))
    with pytest.raises(StoreError, match="get of a"):
        get_many(store, ["a", "b"], pool, limit=2)


def test_importing_starts_no_thread() -> None:
    code = "import threading, composer_prime.store.transfers; assert threading.active_count() == 1"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)
