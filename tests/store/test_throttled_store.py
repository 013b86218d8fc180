"""A throttled store: the average holds each way, records are never late, and the bytes are what they were."""

import threading

import pytest

from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.metered import FIRST_PIECE_S, PIECE_BYTES, SMALL_BYTES, MeteredStore, TokenBucket, throttle

RATE = 1_000_000.0
LARGE = bytes(range(256)) * (8 * PIECE_BYTES // 256) + b"end"


class Clock:
    """Time that passes in sleeps alone."""

    def __init__(self) -> None:
        self.now = 50.0
        self.slept = 0.0
        self._lock = threading.Lock()

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds
            self.slept += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def bucket(clock: Clock) -> TokenBucket:
    return TokenBucket(RATE, clock=lambda: clock.now, sleep=clock.sleep)


@pytest.fixture
def inner(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(request.node.name)


def test_writes_keep_the_rate_on_average(clock: Clock, inner: MemoryStore) -> None:
    store = MeteredStore(inner, up=bucket(clock))
    for number in range(5):
        store.put(f"payload/{number}", LARGE)
    waited_for = 4 * len(LARGE) / RATE - 1.0  # the last one is owed, and a second's bytes were there
    assert clock.slept == pytest.approx(waited_for, rel=0.01)


def test_a_beat_is_written_at_once_after_a_large_payload(clock: Clock, inner: MemoryStore) -> None:
    store = MeteredStore(inner, up=bucket(clock))
    for number in range(3):
        store.put(f"payload/{number}", LARGE)
    before = clock.slept
    store.put("beat", b"x" * SMALL_BYTES)
    assert store.create("record", b"x") and clock.slept == before


def test_reads_keep_the_rate_while_they_go_on(clock: Clock, inner: MemoryStore) -> None:
    inner.put("master", LARGE)
    store = MeteredStore(inner, down=bucket(clock))
    assert store.get_range("master", 0, len(LARGE) + 1) == LARGE
    at_least = (len(LARGE) - PIECE_BYTES) / RATE - 1.0
    assert at_least <= clock.slept <= at_least + 2 * PIECE_BYTES / RATE


def test_small_reads_keep_the_rate_too(clock: Clock, inner: MemoryStore) -> None:
    inner.put("part", LARGE[: PIECE_BYTES - 1])
    store = MeteredStore(inner, down=bucket(clock))
    for _ in range(100):
        store.get("part")
    assert clock.slept == pytest.approx(100 * PIECE_BYTES / RATE - 1.0 - FIRST_PIECE_S, rel=0.05)


def test_what_was_not_used_is_kept_for_a_second_only(clock: Clock, inner: MemoryStore) -> None:
    store = MeteredStore(inner, up=bucket(clock))
    clock.now += 3600
    store.put("a", LARGE)
    store.put("b", LARGE)
    assert clock.slept == pytest.approx(len(LARGE) / RATE - 1.0)


def test_without_limits_the_store_is_itself(inner: MemoryStore) -> None:
    assert throttle(inner, None, None) is inner
    limited = throttle(inner, 8.0, None)
    assert isinstance(limited, MeteredStore) and limited.uri == inner.uri
