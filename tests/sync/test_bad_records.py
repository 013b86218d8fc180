"""One record, put where it doesn't belong or in a form that no site writes, stops nobody and takes nobody's place."""

import pytest

from composer_prime.store import keys
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Close, Commit, Offer
from composer_prime.sync.returning import own_past
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.snapshots import vouched_sha
from composer_prime.sync.start import Founding
from tests.sync.harness import HandSite, empty_commit, make_terms

KEYS = {name: SigningKey.from_bytes(name.encode() * 32) for name in "ab"}
FOUNDING = Founding(keys={name: key.public for name, key in KEYS.items()})


def test_a_close_record_that_names_fewer_masters_than_fragments_vouches_for_nothing(store, clock):
    site = HandSite(store, make_terms(), "a", clock)
    store.create(
        keys.close(),
        Close(versions=(4,), masters=("1" * 64,), voids=((),), closed_by="a").to_bytes(),
    )
    assert site.run.terms.final_version == 4 and vouched_sha(store, site.run, site.roster, 0, 4) is None


@pytest.mark.parametrize("false", [None, b"", b"\x00garbage", b'{"site":"a"'], ids=["copy", "empty", "garbage", "cut"])
def test_a_claim_that_is_no_record_or_a_copy_of_an_older_one_takes_nothing_over(store, clock, false):
    a, b = (HandSite(store, make_terms(), name, clock, key=KEYS[name], founding=FOUNDING) for name in "ab")
    store.create(keys.claim("a", 7), store.get(keys.claim("a", 0)) if false is None else false)
    a.pulse.check()  # no Superseded
    b.courier._members.observe()
    assert "a" in b.courier._members.live(0.0) and b.courier._members.incarnation("a") == 0


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("rubbish", [b"", b'{"site":"b"'])
def test_an_offer_that_is_no_record_is_refused_by_name_and_the_round_closes_without_it(store, clock, rubbish, signed):
    known, founding = (KEYS, FOUNDING) if signed else ({}, Founding())
    sites = [HandSite(store, make_terms(), name, clock, key=known.get(name), founding=founding) for name in "ab"]
    sites[0].hand_over(0, 1.0)
    store.create(keys.offer(0, 0, "b"), rubbish)
    for _ in range(12):
        for site in sites:
            site.tick()
        clock[0] += 1.0
    commit = read_record(store, Commit, keys.commit(0, 0))
    assert [entry.offer.site for entry in commit.taken] == ["a"] and [entry.site for entry in commit.refused] == ["b"]
    assert [site.courier.versions()[0] for site in sites] == [1, 1]


def test_a_copy_of_a_sites_own_offer_in_a_later_round_is_none_of_its_offers(store, clock):
    a = HandSite(store, make_terms(), "a", clock, key=KEYS["a"], founding=FOUNDING)
    a.hand_over(0, 1.0)
    a.runtime.run_tasks()
    a.courier._bring(0)
    a.replicas[0].master = a.replicas[0].master.unchanged()
    store.create(keys.offer(0, 1, "a"), store.get(keys.offer(0, 0, "a")))
    past = own_past(store, a.runtime, a.roster, a.run.terms, a.replicas[0], "a", 1)
    assert past.newest is None and not past.open


@pytest.mark.parametrize("signed", [False, True])
def test_offers_that_are_not_of_that_round_make_no_site_doubt_its_own_master(store, clock, signed):
    """A commit that is void, and offers on another master, made up or copied: it would stop as the odd one out."""
    a = HandSite(store, make_terms(), "a", clock, key=KEYS["a"], founding=FOUNDING)
    a.hand_over(0, 1.0)
    a.runtime.run_tasks()
    a.courier._bring(0)
    offer = read_record(store, Offer, keys.offer(0, 0, "a"))
    for name in ("b",) if signed else ("x", "y", "z"):
        other = offer.model_copy(update={"site": name, "base_sha": "f" * 64, "version": 7 if signed else 0})
        if signed:
            other = other.model_copy(update={"signature": KEYS["b"].sign(other.message(a.run.sha256))})
        store.create(keys.offer(0, 0, name), other.to_bytes())
    unsigned = empty_commit(base_sha="f" * 64, previous=a.run.sha256)
    store.create(keys.commit(0, 0), unsigned.to_bytes())
    a.courier.follow()
    assert a.replicas[0].version == 1 and a.replicas[0].history.voids == (0,)
