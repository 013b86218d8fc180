"""Rates: a bucket gives what was saved up and what has come since, to each site its own."""

from composer_prime.gateway.limits import Limits, Rate, Rates, TokenBucket


def test_a_full_bucket_gives_its_burst_and_then_its_rate() -> None:
    now = [0.0]
    bucket = TokenBucket(Rate(2, 3), lambda: now[0])
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 1]
    now[0] = 0.5
    assert bucket.take() == 0 and bucket.take() == 1
    now[0] = 100
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 1]


def test_the_wait_that_is_named_is_long_enough() -> None:
    now = [0.0]
    bucket = TokenBucket(Rate(2, 10), lambda: now[0])
    assert bucket.take(10) == 0
    wait_s = bucket.take(9)
    assert wait_s == 5
    now[0] += wait_s
    assert bucket.take(9) == 0


def test_what_costs_more_than_a_bucket_holds_takes_a_full_one() -> None:
    now = [0.0]
    bucket = TokenBucket(Rate(1, 5), lambda: now[0])
    assert bucket.take(50) == 0 and bucket.take(50) == 5


def test_sites_have_buckets_of_their_own_and_share_the_gateway_s() -> None:
    limits = Limits(Rates(site=Rate(1, 2), gateway=Rate(1, 3), record_bytes=Rate(1, 10)), lambda: 0.0)
    assert [limits.request("alice") for _ in range(3)] == [0, 0, 1]
    assert limits.request("bob") == 0
    assert limits.request("bob") == 1, "the gateway's own is empty"
    assert limits.record("alice", 10) == 0 and limits.record("alice", 1) == 1 and limits.record("bob", 10) == 0
