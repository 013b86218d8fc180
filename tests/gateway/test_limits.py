"""Rates: a bucket gives what was saved up and what has come since, to each site its own; no answer is too large."""

import secrets
from contextlib import closing

import pytest

from composer_prime.gateway import wire
from composer_prime.gateway.limits import Limits, Rate, Rates
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex
from tests.gateway.guarded import FAST, Guarded, allow_everything, claim_of, guarding, make_run, signed

SOME = Rates(site=Rate(2, 3), gateway=Rate(100, 100), record_bytes=Rate(2, 10))


def test_a_full_bucket_gives_its_burst_and_then_its_rate() -> None:
    now = [0.0]
    limits = Limits(SOME, lambda: now[0])
    assert [limits.request("alice") for _ in range(4)] == [0, 0, 0, 1]
    now[0] = 0.5
    assert limits.request("alice") == 0 and limits.request("alice") == 1
    now[0] = 100
    assert [limits.request("alice") for _ in range(4)] == [0, 0, 0, 1]


def test_the_wait_that_is_named_is_long_enough_and_never_longer_than_a_full_bucket_takes() -> None:
    now = [0.0]
    limits = Limits(SOME, lambda: now[0])
    assert limits.record("alice", 10) == 0
    assert limits.record("alice", 9) == 5 == limits.record("alice", 1000)
    now[0] = 5
    assert limits.record("alice", 1000) == 0


def test_a_debt_is_at_most_a_bucket() -> None:
    now = [0.0]
    limits = Limits(SOME, lambda: now[0])
    limits.owe("alice", 1000)
    assert limits.request("alice") == 1, "a full bucket of 3 can't be owed above what it holds"
    limits.owe("alice", 1000)
    assert limits.request("alice") == 2
    now[0] = 2
    assert limits.request("alice") == 0


def test_sites_have_buckets_of_their_own_and_share_the_gateway_s() -> None:
    limits = Limits(Rates(site=Rate(1, 2), gateway=Rate(1, 3), record_bytes=Rate(1, 10)), lambda: 0.0)
    assert [limits.request("alice") for _ in range(3)] == [0, 0, 1]
    assert limits.request("bob") == 0
    assert limits.request("bob") == 1, "the gateway's own is empty"
    assert limits.record("alice", 10) == 0 and limits.record("alice", 1) == 1 and limits.record("bob", 10) == 0


# --- over HTTP -------------------------------------------------------------------------------------------------------


def test_who_asks_too_often_is_told_when_to_come_again_and_nobody_else_is(store: Store) -> None:
    make_run(store)
    with guarding(store, rates=Rates(site=Rate(0.01, 3), gateway=FAST.gateway)) as gateway:
        answers = [gateway.ask("alice", "GET", "site") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert 60 < int(answers[-1].headers["retry-after"]) <= 100 and "asks oftener" in answers[-1].json()["error"]
        assert gateway.ask("bob", "GET", "site").status_code == 200


def test_records_are_taken_at_a_bounded_rate(store: Store) -> None:
    make_run(store)
    rates = Rates(site=FAST.site, gateway=FAST.gateway, record_bytes=Rate(1, 300))
    with guarding(store, rates=rates) as gateway:
        codes = [claim(gateway, number) for number in range(3)]
    assert codes == [200, 429, 429] and len(store.list(keys.site_prefix("alice"))) == 1


def claim(gateway: Guarded, incarnation: int) -> int:
    data = signed(gateway.served, "alice", claim_of("alice", incarnation))
    target = f"objects/{keys.claim('alice', incarnation)}?operation=create"
    return gateway.ask("alice", "PUT", target, data).status_code


def test_long_listings_count_as_several_requests(store: Store) -> None:
    make_run(store)
    for number in range(2500):
        store.put(keys.tape("bob", number, sha256_hex(b"{}\n")), b"{}\n")
    with guarding(store, rates=Rates(site=Rate(0.001, 5), gateway=FAST.gateway)) as gateway:
        codes = [gateway.ask("alice", "GET", f"keys?prefix={keys.tape_prefix('bob')}").status_code for _ in range(3)]
    assert codes == [200, 200, 429], "each costs three of five"


def test_an_object_larger_than_an_answer_comes_in_spans(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(store)
    allow_everything(monkeypatch)
    monkeypatch.setattr(wire, "SPAN_BYTES", 1000)  # the client's own keeps asking for more than one answer holds
    for module in ("operations", "store"):
        monkeypatch.setattr(f"composer_prime.gateway.{module}.SPAN_BYTES", 1000)
    data = secrets.token_bytes(2005)
    store.put("large", data)
    with guarding(store) as gateway, closing(gateway.store("alice")) as alice:
        assert gateway.ask("alice", "GET", f"objects/large?start=0&length={10**17}").content == data[:1000]
        assert alice.get("large") == data
        assert alice.get_range("large", 3, len(data)) == data[3:]
        assert alice.get_range("large", 7, 1001) == data[7:1008]
        assert alice.get_range("large", 5000, 10) == b""
