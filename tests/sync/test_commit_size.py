"""A commit always fits into a record: what an offer says can't make it longer than anybody reads."""

import numpy as np
import pytest

from composer_prime.store import keys
from composer_prime.sync.canonical import MAX_RECORD_BYTES
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Commit, Offer, Taken
from composer_prime.sync.rounds import MAX_REFUSED, SPARED_BYTES, TAKEN_BYTES
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from tests.sync.harness import HandSite, make_terms

KEYS = {name: SigningKey.from_bytes(name.encode() * 32) for name in "abe"}
FOUNDING = Founding(keys={name: key.public for name, key in KEYS.items()})


@pytest.mark.parametrize("field", ["codec", "payload", "site"])
def test_an_offer_with_an_endless_word_is_refused_in_a_commit_that_can_be_read(store, clock, field):
    terms = make_terms(fragments=1, grace_s=1.0)
    a, b, e = (HandSite(store, terms, name, clock, key=KEYS[name], founding=FOUNDING) for name in "abe")
    for site, value in ((a, 1.0), (b, 2.0), (e, 3.0)):
        site.hand_over(0, value)
        site.runtime.run_tasks()
        site.courier._bring(0)
    offer = read_record(store, Offer, keys.offer(0, 0, "e"))
    room = MAX_RECORD_BYTES - len(offer.to_bytes())
    long = offer.model_copy(update={field: "x" * room})
    signed = long.model_copy(update={"signature": KEYS["e"].sign(long.message(e.run.sha256))})
    store.put(keys.offer(0, 0, "e"), signed.to_bytes())
    for _ in range(9):
        for site in (a, b):
            site.beat()
            site.tick()
        clock[0] += 1.0
    assert a.replicas[0].history.voids == ()
    commit = read_record(store, Commit, keys.commit(0, 0))
    assert [entry.site for entry in commit.taken] == ["a", "b"]
    assert [entry.site for entry in commit.refused] == ["e"] and "xxx" in commit.refused[0].why


def test_what_a_commit_says_besides_of_an_offer_is_counted_as_long_as_it_can_be(store, clock):
    a = HandSite(store, make_terms(fragments=1), "a", clock)
    a.hand_over(0, 1.0)
    a.runtime.run_tasks()
    a.courier._bring(0)
    offer = read_record(store, Offer, keys.offer(0, 0, "a"))
    factors = (float(np.nextafter(np.float32(x), np.float32(1))) for x in (0.1, 1e-5, 1e-38))
    longest = max(factors, key=lambda x: len(repr(x)))
    taken = Taken(offer=offer, multiplier=longest)
    assert len(taken.to_bytes()) + 1 <= len(offer.to_bytes()) + TAKEN_BYTES


def test_of_more_offers_than_a_record_has_room_for_a_round_takes_as_many_as_fit(store, clock, monkeypatch):
    terms = make_terms(fragments=1)
    sites = [HandSite(store, terms, name, clock) for name in "abcd"]
    for value, site in enumerate(sites):
        site.hand_over(0, value + 1.0)
        site.runtime.run_tasks()
        site.courier._bring(0)
    room = 4 * len(store.get(keys.offer(0, 0, "a")))
    monkeypatch.setattr("composer_prime.sync.rounds.MAX_RECORD_BYTES", SPARED_BYTES + room)
    for _ in range(6):
        for site in sites:
            site.tick()
        clock[0] += 1.0
    commit = read_record(store, Commit, keys.commit(0, 0))
    assert sum(len(entry.to_bytes()) + 1 for entry in commit.taken) <= room, "their multipliers need room, too"
    assert len(commit.taken) == 3 and {site.courier.versions() for site in sites} == {(1,)}
    (left,) = (site for site in sites if site.name not in {entry.site for entry in commit.taken})
    settled = left.courier.collect(0)[1]
    assert settled is not None and settled.outcome == "missed"


def test_a_commit_names_so_many_refused_offers_that_it_can_be_read(store, clock):
    a = HandSite(store, make_terms(fragments=1, grace_s=1.0), "a", clock)
    a.hand_over(0, 1.0)
    for number in range(2 * MAX_REFUSED):
        store.put(keys.offer(0, 0, f"junk-{number}"), b"{}")
    for _ in range(4):
        a.tick()
        clock[0] += 1.0
    commit = read_record(store, Commit, keys.commit(0, 0))
    assert [entry.site for entry in commit.taken] == ["a"] and len(commit.refused) == MAX_REFUSED
