"""The loop of retries, on a clock of its own: bounded by both limits, and no two sites in step."""

import random

import pytest

from composer_prime.store import retry as module
from composer_prime.store.retry import Patience, patience_for, retry


class Clock:
    """Time that passes only in sleeps and in attempts."""

    def __init__(self, attempt_s: float = 0.0) -> None:
        self.now = 1000.0
        self.attempt_s = attempt_s
        self.pauses: list[float] = []
        self.lefts: list[float] = []

    def sleep(self, pause: float) -> None:
        self.pauses.append(pause)
        self.now += pause

    def run(self, patience: Patience, *, num_failures: int = 10**6, may_pass: bool = True) -> str:
        def attempt(left_s: float) -> str:
            self.lefts.append(left_s)
            self.now += min(self.attempt_s, left_s)
            if len(self.lefts) <= num_failures:
                raise OSError(f"failure {len(self.lefts)}")
            return "done"

        return retry(
            attempt,
            patience,
            failures=(OSError,),
            may_pass=lambda error: may_pass,
            what="act",
            clock=lambda: self.now,
            sleep=self.sleep,
        )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(7)


def test_failures_that_pass_are_outlived_with_growing_pauses() -> None:
    clock = Clock()
    assert clock.run(Patience(30, 90), num_failures=5) == "done"
    for number, pause in enumerate(clock.pauses):
        longest = module.FIRST_PAUSE_S * 2**number
        assert longest / 2 <= pause <= longest


def test_sites_that_lost_the_same_server_at_once_do_not_come_back_to_it_together() -> None:
    sites = [Clock() for _ in range(20)]
    for site in sites:
        site.run(Patience(30, 90), num_failures=6)
    for pauses in zip(*(site.pauses for site in sites), strict=True):
        assert len(set(pauses)) == len(sites)
        assert max(pauses) - min(pauses) > max(pauses) / 4, "they are spread over the pause, not a moment apart"


def test_last_failure_is_raised_when_its_time_is_over() -> None:
    clock = Clock()
    with pytest.raises(OSError, match="failure"):
        clock.run(Patience(retry_s=30, deadline_s=90))
    assert 30 - module.MAX_PAUSE_S <= clock.now - 1000 <= 30
    assert max(clock.pauses) <= module.MAX_PAUSE_S


def test_slow_attempts_end_at_the_deadline_of_the_whole_operation() -> None:
    clock = Clock(attempt_s=40)
    with pytest.raises(OSError):
        clock.run(Patience(retry_s=60, deadline_s=90))
    assert clock.now - 1000 <= 90
    assert clock.lefts == sorted(clock.lefts, reverse=True) and clock.lefts[0] == 90 and clock.lefts[-1] < 30


def test_time_to_retry_counts_from_the_first_failure() -> None:
    clock = Clock(attempt_s=40)
    assert clock.run(Patience(retry_s=5, deadline_s=90), num_failures=1) == "done"


def test_failure_that_lasts_is_raised_at_once() -> None:
    clock = Clock()
    with pytest.raises(OSError, match="failure 1"):
        clock.run(Patience(30, 90), may_pass=False)
    assert clock.pauses == []


def test_exception_that_is_no_failure_is_not_caught() -> None:
    def attempt(left_s: float) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        retry(attempt, Patience(30, 90), failures=(OSError,), may_pass=lambda error: True, what="act")


def test_large_transfers_have_longer() -> None:
    assert patience_for(0).deadline_s == module.OPERATION_S
    assert patience_for(2**30).deadline_s == module.OPERATION_S + 2**30 / module.SLOWEST_BYTES_PER_S
    assert patience_for(None).deadline_s == module.UNKNOWN_SIZE_S
