"""Tries and pauses of a store that fails, on a clock of its own: bounded by both limits, and no two sites in step."""

import random

import pytest

from composer_prime.errors import StoreError
from composer_prime.store import remote
from composer_prime.store.remote import Answer, RemoteStore


class Failing(RemoteStore):
    """Its reads fail at first; time passes in sleeps and in attempts alone."""

    _failures = (OSError, ValueError)
    _endpoint = "nowhere"
    _credentials_remedy = ""

    def __init__(self, num_failures: int = 10**6, attempt_s: float = 0.0, kind: type[Exception] = OSError) -> None:
        super().__init__("failing://store")
        self.now = 1000.0
        self.pauses: list[float] = []
        self.lefts: list[float] = []
        self._num_failures, self._attempt_s, self._kind = num_failures, attempt_s, kind

    def monotonic(self) -> float:
        return self.now

    def sleep(self, pause: float) -> None:
        self.pauses.append(pause)
        self.now += pause

    def _look(self, left_s: float) -> None:
        """It answers."""

    def _fetch(self, key: str, left_s: float, span: object) -> bytes:
        self.lefts.append(left_s)
        self.now += min(self._attempt_s, left_s)
        if len(self.lefts) <= self._num_failures:
            raise self._kind(f"failure {len(self.lefts)}")
        return b"done"

    _store = _names = _remove = _fetch  # type: ignore[assignment]

    def _answer(self, error: Exception) -> Answer:
        return Answer(0, "", str(error))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch):
    random.seed(7)

    def read(store: Failing, *length: int) -> bytes:
        monkeypatch.setattr(remote, "time", store)
        return store.get_range("k", 0, *length) if length else store.get("k")

    return read


def test_failures_that_pass_are_outlived_with_growing_pauses(read) -> None:
    store = Failing(num_failures=5)
    assert read(store) == b"done"
    for number, pause in enumerate(store.pauses):
        longest = remote.FIRST_PAUSE_S * 2**number
        assert longest / 2 <= pause <= longest


def test_sites_that_lost_the_same_server_at_once_do_not_come_back_to_it_together(read) -> None:
    sites = [Failing(num_failures=6) for _ in range(20)]
    assert {read(site) for site in sites} == {b"done"}
    for pauses in zip(*(site.pauses for site in sites), strict=True):
        assert len(set(pauses)) == len(sites)
        assert max(pauses) - min(pauses) > max(pauses) / 4, "they are spread over the pause, not a moment apart"


def test_last_failure_is_raised_when_its_time_is_over(read) -> None:
    store = Failing()
    with pytest.raises(StoreError, match="OSError: failure"):
        read(store)
    assert remote.RETRY_S - remote.MAX_PAUSE_S <= store.now - 1000 <= remote.RETRY_S
    assert max(store.pauses) <= remote.MAX_PAUSE_S


def test_slow_attempts_end_at_the_deadline_of_the_whole_operation(read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 60)
    store = Failing(attempt_s=40)
    with pytest.raises(StoreError):
        read(store, 0)
    assert store.now - 1000 <= remote.OPERATION_S == 90
    assert store.lefts == sorted(store.lefts, reverse=True) and store.lefts[0] == 90 and store.lefts[-1] < 30


def test_time_to_retry_counts_from_the_first_failure(read) -> None:
    assert read(Failing(num_failures=1, attempt_s=remote.RETRY_S + 10)) == b"done"


def test_failure_that_lasts_is_raised_at_once(read) -> None:
    store = Failing(kind=ValueError)
    with pytest.raises(StoreError, match="failure 1"):
        read(store)
    assert store.pauses == []


def test_exception_that_is_no_failure_is_not_caught(read) -> None:
    with pytest.raises(KeyError):
        read(Failing(kind=KeyError))


@pytest.mark.parametrize("length", [2**30, None])
def test_large_transfers_and_those_of_unknown_size_have_longer(read, length: int | None) -> None:
    store = Failing(num_failures=0)
    read(store, *([] if length is None else [length]))
    longer = remote.UNKNOWN_SIZE_S if length is None else remote.OPERATION_S + 2**30 / remote.SLOWEST_BYTES_PER_S
    assert store.lefts == [longer]
