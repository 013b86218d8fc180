"""One site's errands, with couriers on a hand-driven clock: who closes a round, when, and on what."""

import base64

import pytest
import torch

from composer_prime.errors import MasterMismatch
from composer_prime.outer.codecs import get_codec
from composer_prime.outer.slices import root_sha256, slice_digest
from composer_prime.store import keys
from composer_prime.sync.protocol import STAGGER_S
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Offer
from composer_prime.sync.replica import rebuild_master
from composer_prime.sync.snapshots import Master
from tests.sync.harness import HandSite, closing, commit_of, make_terms


def outcome_of(site: HandSite, fragment: int = 0) -> str | None:
    settled = site.courier.collect(fragment)[1]
    return None if settled is None else settled.outcome


def rebuild(site: HandSite, version: int):
    return rebuild_master(site.store, site.run, 0, version, runtime=site.runtime, roster=site.roster)


def test_two_offers_make_one_master_by_their_weighted_mean(store, clock):
    a, b = (HandSite(store, make_terms(), name, clock) for name in "ab")
    start = a.courier.master(0).weights
    a.hand_over(0, 1.0, tokens=10)
    b.hand_over(0, 2.0, tokens=30)
    closing(clock, a, b)
    assert a.courier.versions() == b.courier.versions() == (1, 0)
    assert a.courier.master(0).sha256 == b.courier.master(0).sha256
    assert torch.equal(a.courier.master(0).weights, start - (0.25 * 1.0 + 0.75 * 2.0))
    assert [outcome_of(a), outcome_of(b)] == ["taken", "taken"]
    assert [entry.multiplier for entry in commit_of(store).taken] == [0.25, 0.75]


def test_nobody_closes_a_round_that_a_live_site_has_not_offered_to_until_grace(store, clock):
    a, b = (HandSite(store, make_terms(grace_s=10.0), name, clock) for name in "ab")
    a.hand_over(0, 1.0)
    closing(clock, a, passes=9)
    assert a.courier.versions() == (0, 0)
    clock[0] += 2.0
    closing(clock, a)
    assert a.courier.versions() == (1, 0) and outcome_of(b) is None


def offer_all(clock: list[float], sites: list[HandSite]) -> None:
    """Each hands a movement over that nobody has offered before."""
    for index, site in enumerate(sites):
        site.courier.collect(0)
        site.hand_over(0, 1.0 + index / 10 + clock[0])


def play_at_once(clock: list[float], sites: list[HandSite]) -> None:
    """A round that closes now, since every live site offers."""
    offer_all(clock, sites)
    for _ in range(3):
        for site in sites:
            site.tick()
    clock[0] += 2.0


def seconds_to_close(clock: list[float], sites: list[HandSite]) -> float:
    """Play a round in which only these sites offer; how long it took until its commit stood."""
    key, began = keys.commit(0, sites[0].courier.versions()[0]), clock[0]
    offer_all(clock, sites)
    while not sites[0].store.list(key) and clock[0] - began < 60.0:
        clock[0] += 0.25
        for site in sites:
            site.tick()
    for site in sites:
        site.tick()
    return clock[0] - began


def test_grace_follows_how_long_the_rounds_took_that_a_site_saw_close(store, clock):
    a, b, c = (HandSite(store, make_terms(rounds=9, grace_s=30.0, liveness_s=1e6), name, clock) for name in "abc")
    for _ in range(3):
        play_at_once(clock, [a, b, c])
    assert a.courier.versions() == (3, 0)
    assert 2.0 <= seconds_to_close(clock, [a, b]) <= 2.5 + STAGGER_S, "c is live and says nothing"
    assert [entry.site for entry in commit_of(store, 3).taken] == ["a", "b"]


def test_rounds_that_a_site_took_no_part_in_do_not_lengthen_its_grace(store, clock):
    a, b, c = (HandSite(store, make_terms(rounds=20, grace_s=30.0, liveness_s=1e6), name, clock) for name in "abc")
    for _ in range(3):
        play_at_once(clock, [a, b, c])
    for _ in range(4):
        seconds_to_close(clock, [b, c])
        clock[0] += 20.0
        a.tick()
    assert {site.courier.versions() for site in (a, b, c)} == {(7, 0)}
    assert seconds_to_close(clock, [a, b]) <= 2.5 + STAGGER_S
    assert commit_of(store, 7).committer == "a", "to b a round takes longer by now"


def test_a_dead_site_holds_a_round_up_only_until_its_beat_times_out(store, clock):
    a, _dead = (HandSite(store, make_terms(grace_s=1e6, liveness_s=10.0), name, clock) for name in "ab")
    a.hand_over(0, 1.0)
    a.tick()
    assert a.courier.versions() == (0, 0)
    clock[0] += 11.0
    a.beat()
    closing(clock, a)
    assert a.courier.versions() == (1, 0)


def test_an_offer_that_comes_too_late_is_missed_and_its_work_left_to_the_site(store, clock):
    a, b = (HandSite(store, make_terms(grace_s=0.0), name, clock) for name in "ab")
    a.hand_over(0, 1.0)
    closing(clock, a)
    b.hand_over(0, 2.0)
    b.tick()
    assert b.courier.versions() == (1, 0)
    assert b.courier.master(0).version == 1 and outcome_of(b) == "missed"


def test_an_upload_that_outlasts_its_round_is_taken_in_the_next_one(store, clock):
    a, b = (HandSite(store, make_terms(grace_s=0.0), name, clock) for name in "ab")
    start = a.courier.master(0).weights
    a.hand_over(0, 1.0)
    b.hand_over(0, 2.0)  # its upload doesn't run yet
    closing(clock, a)
    b.courier.tick()
    assert outcome_of(b) == "out" and b.courier.versions() == (1, 0)
    b.tick()
    record = Offer.from_bytes(store.get(keys.offer(0, 1, "b")), "offer")
    assert record.payload is not None and keys.parse_payload(record.payload)[1] == 0
    closing(clock, b, a)
    assert outcome_of(b) == "taken" and b.courier.versions() == (2, 0)
    assert torch.equal(b.courier.master(0).weights, start - 1.0 - 2.0)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "nan", "absent"])
def test_an_offer_whose_payload_is_damaged_is_refused_and_named_in_the_commit(store, clock, damage):
    a, b = (HandSite(store, make_terms(grace_s=5.0), name, clock) for name in "ab")
    a.hand_over(0, 1.0)
    b.hand_over(0, 2.0)
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
        poison = bytearray(get_codec("fp32").encode(torch.full((b.replicas[0].numel,), 2.0)))
        poison[:4] = b"\x00\x00\xc0\x7f"
        digest = slice_digest(bytes(poison))
        forged = keys.payload(0, 0, "b", root_sha256([digest]))
        store.put(forged, bytes(poison))
        changes = {"payload": forged, "sha256": root_sha256([digest]), "slices": base64.b64encode(digest).decode()}
        store.put(keys.offer(0, 0, "b"), record.model_copy(update=changes).to_bytes())
    closing(clock, a, passes=9)
    record = commit_of(store)
    assert [entry.site for entry in record.taken] == ["a"]
    assert [entry.site for entry in record.refused] == ["b"]


def forge_commit(site: HandSite, **changes) -> None:
    """Create a commit of the open round as a wrong-doer would, of the offers that stand."""
    offers = [read_record(site.store, Offer, key) for key in site.store.list(keys.offers_prefix(0, 0))]
    site.commit_taking(*offers, **changes)


def test_later_commits_say_which_were_void_so_that_joiners_know(store, clock):
    a = HandSite(store, make_terms(rounds=9, snapshot_rounds=2), "a", clock)
    a.offer(0, 1.0)
    forge_commit(a, num_parts=7)
    closing(clock, a)
    assert outcome_of(a) == "void"
    run_rounds(clock, [a], 3)
    assert commit_of(store, 1).voids == (0,) and commit_of(store, 3).voids == (0,)
    late = HandSite(store, make_terms(rounds=9, snapshot_rounds=2), "b", clock)
    assert late.replicas[0].history.voids == (0,) == a.replicas[0].history.voids
    assert late.replicas[0].history.taken == a.replicas[0].history.taken


def run_rounds(clock, sites, rounds: int) -> None:
    for number in range(rounds):
        for index, site in enumerate(sites):
            site.hand_over(0, 0.1 * (number + 1) * (index + 1))
        closing(clock, *sites)
        for site in sites:
            site.courier.collect(0)


def test_masters_rebuilt_from_any_snapshot_and_the_log_are_bit_identical(store, clock):
    terms = make_terms(rounds=9, momentum=0.9, lr=0.7, codec="int8", snapshot_rounds=3)
    sites = [HandSite(store, terms, name, clock) for name in "ab"]
    run_rounds(clock, sites, 7)
    a = sites[0]
    for version in range(8):
        rebuilt = rebuild(a, version)
        assert rebuilt.version == version
    assert rebuilt.sha256 == a.courier.master(0).sha256
    for key in store.list(keys.masters_prefix(0)):
        if keys.parse_master(key)[1] > 0:
            store.delete(key)
    from_start = rebuild(a, 7)
    assert from_start.sha256 == a.courier.master(0).sha256


def test_a_corrupt_snapshot_is_passed_over_for_an_older_one(store, clock):
    a = HandSite(store, make_terms(rounds=9), "a", clock)
    run_rounds(clock, [a], 5)
    newest = next(key for key in store.list(keys.masters_prefix(0)) if keys.parse_master(key)[1] == 4)
    store.put(newest, store.get(newest)[:-4] + b"\x00\x00\x00\x01")
    late = HandSite(store, make_terms(rounds=9), "b", clock)
    assert late.courier.master(0).sha256 == a.courier.master(0).sha256


def test_a_site_with_a_wrong_master_stops_before_it_closes_a_round(store, clock):
    a, b, c = (HandSite(store, make_terms(rounds=9, quorum=2), name, clock) for name in "abc")
    good = a.courier.master(0)
    b.replicas[0].master = Master(0, 0, good.weights + 1, good.momentum)
    for value, site in enumerate((a, b, c)):
        site.offer(0, value + 1.0)
    with pytest.raises(MasterMismatch, match="This site stops"):
        for _ in range(3):
            closing(clock, b)
            clock[0] += 30.0
    assert not store.list(keys.commit(0, 0))
    closing(clock, a, c)
    assert [entry.site for entry in commit_of(store).taken] == ["a", "c"]
    again = HandSite(store, make_terms(rounds=9, quorum=2), "b", clock)
    assert again.courier.master(0).sha256 == a.courier.master(0).sha256


def test_a_site_that_committed_on_a_wrong_master_stops_and_started_again_calls_its_commit_void_as_all_do(store, clock):
    a, b, c = (HandSite(store, make_terms(rounds=9), name, clock) for name in "abc")
    good = a.courier.master(0)
    for site in (a, b, c):
        site.offer(0, 1.0)
    wrong = Master(0, 0, good.weights + 1, good.momentum)
    b.replicas[0].master = wrong
    forge_commit(b, base_sha=wrong.sha256)
    with pytest.raises(MasterMismatch):
        b.courier.follow()
    closing(clock, a, c)
    again = HandSite(store, make_terms(rounds=9), "b", clock)
    for site in (a, c, again):
        assert (site.courier.master(0).version, site.courier.master(0).sha256) == (1, good.sha256)


@pytest.mark.parametrize("others", ["b", "bc"])
def test_a_site_that_made_its_master_on_entering_stops_when_two_others_stand_on_another(store, clock, others):
    a, *rest = (HandSite(store, make_terms(rounds=9), name, clock) for name in f"a{others}")
    for site in rest:
        site.offer(0, 1.0)
    for key in (keys.offer(0, 0, name) for name in others):
        store.put(key, Offer.from_bytes(store.get(key), key).model_copy(update={"base_sha": "0" * 64}).to_bytes())
    forge_commit(a, base_sha="0" * 64)
    if len(others) > 1:
        with pytest.raises(MasterMismatch, match="this machine computes differently"):
            a.courier.follow()
    else:
        a.courier.follow()
        assert a.courier.master(0).version == 1, "the round is void"


def test_the_run_closes_with_all_final_masters_stored(store, clock):
    terms = make_terms(rounds=1, snapshot_rounds=100)
    a = HandSite(store, terms, "a", clock)
    for fragment in (0, 1, 0, 1):
        a.hand_over(fragment, 0.5)
        closing(clock, a)
        a.courier.collect(fragment)
    assert a.courier.versions() == (2, 2) and a.courier.closed
    late = HandSite(store, terms, "b", clock)
    assert [late.courier.master(f).sha256 for f in (0, 1)] == [a.courier.master(f).sha256 for f in (0, 1)]
    assert late.replicas[0].advance() == []
