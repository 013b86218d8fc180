"""One site's errands, with couriers on a hand-driven clock: who closes a round, when, and on what."""

import json

import pytest
import torch

from composer_prime.errors import MasterMismatch, StoreError
from composer_prime.outer.codecs import get_codec
from composer_prime.store import keys, open_store
from composer_prime.sync.courier import Capture
from composer_prime.sync.records import Commit, Offer, sha256_hex
from composer_prime.sync.replica import Replica, rebuild_master
from tests.sync.harness import HandClock, HandSite, make_terms


@pytest.fixture
def store(request):
    return open_store(f"memory://{request.node.name}")


@pytest.fixture
def clock():
    return HandClock()


def movement(site: HandSite, fragment: int, value: float) -> torch.Tensor:
    return torch.full((site.fragments[fragment].numel,), value)


def hand_over(site: HandSite, value: float, *, fragment: int = 0, tokens: int = 10) -> None:
    site.courier.submit(Capture(fragment, movement(site, fragment, value), tokens, 1, tokens))


def commit_of(store, fragment: int, version: int) -> Commit:
    key = keys.commit(fragment, version)
    return Commit.from_bytes(store.get(key), key)


def closing(clock: HandClock, *sites: HandSite) -> None:
    """Tick everybody past the stagger, so that the round closes if it may."""
    for _ in range(4):
        for site in sites:
            site.tick()
        clock.now += 1.0


def test_two_offers_make_one_master_by_their_weighted_mean(store, clock):
    a, b = (HandSite(store, make_terms(), name, clock) for name in "ab")
    start = a.courier.master(0).weights
    hand_over(a, 1.0, tokens=10)
    hand_over(b, 2.0, tokens=30)
    closing(clock, a, b)
    assert a.courier.versions() == b.courier.versions() == (1, 0)
    assert a.courier.master(0).sha256 == b.courier.master(0).sha256
    assert torch.equal(a.courier.master(0).weights, start - (0.25 * 1.0 + 0.75 * 2.0))
    assert [a.courier.collect(0)[1], b.courier.collect(0)[1]] == ["taken", "taken"]
    assert [entry.multiplier for entry in commit_of(store, 0, 0).taken] == [0.25, 0.75]


def test_second_site_throws_its_own_initial_weights_away(store, clock):
    a, b = HandSite(store, make_terms(), "a", clock, seed=1), HandSite(store, make_terms(), "b", clock, seed=2)
    assert a.courier.master(0).sha256 == b.courier.master(0).sha256 == a.manifest.masters[0]


def test_nobody_closes_a_round_that_a_live_site_has_not_offered_to_until_grace(store, clock):
    a, b = (HandSite(store, make_terms(grace_s=10.0), name, clock) for name in "ab")
    hand_over(a, 1.0)
    for _ in range(9):
        a.tick()
        clock.now += 1.0
    assert a.courier.versions() == (0, 0)
    clock.now += 2.0
    closing(clock, a)
    assert a.courier.versions() == (1, 0) and b.courier.collect(0)[1] is None


def test_a_dead_site_holds_a_round_up_only_until_its_beat_times_out(store, clock):
    a, _dead = (HandSite(store, make_terms(grace_s=1e6, liveness_s=10.0), name, clock) for name in "ab")
    hand_over(a, 1.0)
    a.tick()
    assert a.courier.versions() == (0, 0)
    clock.now += 11.0
    a.beat()
    closing(clock, a)
    assert a.courier.versions() == (1, 0)


def test_an_offer_that_comes_too_late_is_missed_and_its_work_left_to_the_site(store, clock):
    a, b = (HandSite(store, make_terms(grace_s=0.0), name, clock) for name in "ab")
    hand_over(a, 1.0)
    closing(clock, a)
    hand_over(b, 2.0)
    b.uploads.run()
    b.courier.tick()
    assert b.courier.versions() == (1, 0)
    master, outcome = b.courier.collect(0)
    assert (master.version, outcome) == (1, "missed")


def test_an_upload_that_outlasts_its_round_is_taken_in_the_next_one(store, clock):
    a, b = (HandSite(store, make_terms(grace_s=0.0), name, clock) for name in "ab")
    start = a.courier.master(0).weights
    hand_over(a, 1.0)
    hand_over(b, 2.0)  # its upload doesn't run yet
    closing(clock, a)
    b.courier.tick()
    assert b.courier.collect(0)[1] == "out" and b.courier.versions() == (1, 0)
    b.tick()
    record = Offer.from_bytes(store.get(keys.offer(0, 1, "b")), "offer")
    assert record.payload is not None and keys.parse_payload(record.payload)[1] == 0
    closing(clock, b, a)
    assert b.courier.collect(0)[1] == "taken" and b.courier.versions() == (2, 0)
    assert torch.equal(b.courier.master(0).weights, start - 1.0 - 2.0)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "nan", "absent"])
def test_an_offer_whose_payload_is_damaged_is_refused_and_named_in_the_commit(store, clock, damage):
    a, b = (HandSite(store, make_terms(grace_s=5.0), name, clock) for name in "ab")
    hand_over(a, 1.0)
    hand_over(b, 2.0)
    b.tick()
    record = Offer.from_bytes(store.get(keys.offer(0, 0, "b")), "offer")
    assert record.payload is not None
    data = bytearray(store.get(record.payload))
    if damage == "absent":
        store.delete(record.payload)
    elif damage == "truncated":
        store.put(record.payload, bytes(data[:-1]))
    elif damage == "flipped":
        data[3] ^= 1
        store.put(record.payload, bytes(data))
    else:
        poison = bytearray(get_codec("fp32").encode(movement(b, 0, 2.0)))
        poison[:4] = b"\x00\x00\xc0\x7f"
        forged = keys.payload(0, 0, "b", sha256_hex(bytes(poison)))
        store.put(forged, bytes(poison))
        changed = record.model_copy(update={"payload": forged, "sha256": sha256_hex(bytes(poison))})
        store.put(keys.offer(0, 0, "b"), changed.to_bytes())
    closing(clock, a)
    clock.now += 5.0
    closing(clock, a)
    record = commit_of(store, 0, 0)
    assert [entry.site for entry in record.taken] == ["a"]
    assert [entry.site for entry in record.refused] == ["b"]


def test_a_commit_that_breaks_a_rule_is_a_void_round_for_everybody(store, clock):
    a, b = (HandSite(store, make_terms(), name, clock) for name in "ab")
    before = a.courier.master(0)
    hand_over(a, 1.0)
    hand_over(b, 2.0)
    for site in (a, b):
        site.uploads.run()
        site.courier._bring(0)
    offers = {name: Offer.from_bytes(store.get(keys.offer(0, 0, name)), name) for name in "ab"}
    heavy = [
        {
            "site": name,
            "incarnation": 0,
            "payload": offer.payload,
            "sha256": offer.sha256,
            "tokens": 10,
            "multiplier": 9.0,
        }
        for name, offer in offers.items()
    ]
    bad = {"fragment": 0, "version": 0, "base_sha": before.sha256, "taken": heavy, "refused": [], "committer": "b"}
    store.create(keys.commit(0, 0), json.dumps({**bad, "previous": a.manifest_sha, "incarnation": 0}).encode())
    closing(clock, a, b)
    for site in (a, b):
        master, outcome = site.courier.collect(0)
        assert (master.version, master.sha256, outcome) == (1, before.sha256, "missed")


def test_bytes_that_are_no_commit_are_a_void_round_and_the_log_goes_on(store, clock):
    a = HandSite(store, make_terms(), "a", clock)
    before = a.courier.master(0)
    store.create(keys.commit(0, 0), b"\x00garbage")
    hand_over(a, 1.0)
    closing(clock, a)
    assert a.courier.collect(0)[1] == "missed" and a.courier.master(0).sha256 == before.sha256
    hand_over(a, 1.0)
    closing(clock, a)
    assert a.courier.versions() == (2, 0)
    assert commit_of(store, 0, 1).previous == sha256_hex(b"\x00garbage")


def run_rounds(clock, sites, rounds: int) -> None:
    for number in range(rounds):
        for index, site in enumerate(sites):
            hand_over(site, 0.1 * (number + 1) * (index + 1))
        closing(clock, *sites)
        for site in sites:
            site.courier.collect(0)


def test_masters_rebuilt_from_any_snapshot_and_the_log_are_bit_identical(store, clock):
    terms = make_terms(rounds=9, momentum=0.9, lr=0.7, codec="int8", snapshot_rounds=3)
    sites = [HandSite(store, terms, name, clock) for name in "ab"]
    run_rounds(clock, sites, 7)
    a = sites[0]
    for version in range(8):
        rebuilt = rebuild_master(store, a.manifest, a.manifest_sha, 0, a.fragments[0].numel, version)
        assert rebuilt.version == version
    assert rebuilt.sha256 == a.courier.master(0).sha256
    for key in store.list(keys.masters_prefix(0)):
        if keys.parse_master(key)[1] > 0:
            store.delete(key)
    from_start = rebuild_master(store, a.manifest, a.manifest_sha, 0, a.fragments[0].numel, 7)
    assert from_start.sha256 == a.courier.master(0).sha256


def test_a_corrupt_snapshot_is_passed_over_for_an_older_one(store, clock):
    a = HandSite(store, make_terms(rounds=9), "a", clock)
    run_rounds(clock, [a], 5)
    newest = next(key for key in store.list(keys.masters_prefix(0)) if keys.parse_master(key)[1] == 4)
    store.put(newest, store.get(newest)[:-4] + b"\x00\x00\x00\x01")
    late = HandSite(store, make_terms(rounds=9), "b", clock)
    assert late.courier.master(0).sha256 == a.courier.master(0).sha256


def test_a_replica_that_went_wrong_heals_from_the_log(store, clock):
    a, b = (HandSite(store, make_terms(rounds=9), name, clock) for name in "ab")
    run_rounds(clock, [a, b], 2)
    good = a.courier.master(0)
    b.replicas[0].master = type(good).of(0, 2, good.weights + 1, good.momentum)
    hand_over(a, 1.0)
    clock.now += 100.0
    closing(clock, a)
    b.courier.follow()
    assert b.courier.master(0).version == 3 and b.courier.master(0).sha256 == a.courier.master(0).sha256


def test_a_commit_on_another_master_than_the_log_makes_stops_the_site(store, clock):
    a = HandSite(store, make_terms(rounds=9), "a", clock)
    hand_over(a, 1.0)
    closing(clock, a)
    wrong = {"fragment": 0, "version": 1, "base_sha": "0" * 64, "taken": [], "refused": [], "committer": "z"}
    previous = sha256_hex(store.get(keys.commit(0, 0)))
    store.create(keys.commit(0, 1), json.dumps({**wrong, "previous": previous, "incarnation": 0}).encode())
    with pytest.raises(MasterMismatch, match="computes differently"):
        a.courier.follow()


def test_a_payload_that_cannot_be_read_is_never_skipped(store, clock):
    terms = make_terms(rounds=9)
    a = HandSite(store, terms, "a", clock)
    hand_over(a, 1.0)
    closing(clock, a)
    payload = commit_of(store, 0, 0).taken[0].payload
    data = store.get(payload)
    store.put(payload, data[:-1])
    late = Replica(store, a.manifest, a.manifest_sha, 0, a.fragments[0].numel)
    with pytest.raises(StoreError, match="can't be skipped"):
        late.advance()
    store.put(payload, data)
    assert late.advance() is not None and late.master.sha256 == a.courier.master(0).sha256


def test_the_run_closes_with_all_final_masters_stored(store, clock):
    terms = make_terms(rounds=1, snapshot_rounds=100)
    a = HandSite(store, terms, "a", clock)
    for fragment in (0, 1, 0, 1):
        hand_over(a, 0.5, fragment=fragment)
        closing(clock, a)
        a.courier.collect(fragment)
    assert a.courier.versions() == (2, 2) and a.courier.closed
    late = HandSite(store, terms, "b", clock)
    assert [late.courier.master(f).sha256 for f in (0, 1)] == [a.courier.master(f).sha256 for f in (0, 1)]
    assert late.replicas[0].advance() is None
