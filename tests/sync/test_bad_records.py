"""Records and payloads that no sound site makes: they stop nobody, take nobody's place, and move nobody."""

import base64
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from composer_prime.errors import PayloadUnsound, StoreError
from composer_prime.outer.codecs import get_codec
from composer_prime.outer.payloads import code, decode, plan_slices
from composer_prime.outer.slices import root_sha256, slice_digest
from composer_prime.store import keys
from composer_prime.sync.canonical import MAX_RECORD_BYTES
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Close, Offer, Taken
from composer_prime.sync.replica import Replica
from composer_prime.sync.returning import own_past
from composer_prime.sync.rounds import MAX_REFUSED, SPARED_BYTES, TAKEN_BYTES
from composer_prime.sync.snapshots import vouched_sha
from composer_prime.sync.start import Founding
from composer_prime.sync.verifying import Verifier
from tests.sync.harness import KEYS, OWNER, HandSite, admitting, beating, closing, commit_of, empty_commit, make_terms

# --- records where they don't belong, or in a form that no site writes -----------------------------------------------


FOUNDING = admitting("abe")


def test_a_close_record_that_names_fewer_masters_than_fragments_vouches_for_nothing(store, clock):
    site = HandSite(store, make_terms(), "a", clock)
    store.create(keys.close(), Close(versions=(4,), masters=("1" * 64,), voids=((),), closed_by="a").to_bytes())
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
    closing(clock, *sites, passes=12)
    commit = commit_of(store)
    assert [entry.offer.site for entry in commit.taken] == ["a"] and [entry.site for entry in commit.refused] == ["b"]
    assert [site.courier.versions()[0] for site in sites] == [1, 1]


def test_a_copy_of_a_sites_own_offer_in_a_later_round_is_none_of_its_offers(store, clock):
    a = HandSite(store, make_terms(), "a", clock, key=KEYS["a"], founding=FOUNDING)
    a.offer(0, 1.0)
    a.replicas[0].master = a.replicas[0].master.unchanged()
    store.create(keys.offer(0, 1, "a"), store.get(keys.offer(0, 0, "a")))
    past = own_past(store, a.runtime, a.roster, a.run.terms, a.replicas[0], "a", 1)
    assert past.newest is None and not past.open


@pytest.mark.parametrize("signed", [False, True])
def test_offers_that_are_not_of_that_round_make_no_site_doubt_its_own_master(store, clock, signed):
    """A commit that is void, and offers on another master, made up or copied: it would stop as the odd one out."""
    a = HandSite(store, make_terms(), "a", clock, key=KEYS["a"], founding=FOUNDING)
    offer = a.offer(0, 1.0)
    for name in ("b",) if signed else ("x", "y", "z"):
        other = offer.model_copy(update={"site": name, "base_sha": "f" * 64, "version": 7 if signed else 0})
        if signed:
            other = other.model_copy(update={"signature": KEYS["b"].sign(other.message(a.run.sha256))})
        store.create(keys.offer(0, 0, name), other.to_bytes())
    unsigned = empty_commit(base_sha="f" * 64, previous=a.run.sha256)
    store.create(keys.commit(0, 0), unsigned.to_bytes())
    a.courier.follow()
    assert a.replicas[0].version == 1 and a.replicas[0].history.voids == (0,)


# --- a commit always fits into a record ------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["codec", "payload", "site"])
def test_an_offer_with_an_endless_word_is_refused_in_a_commit_that_can_be_read(store, clock, field):
    terms = make_terms(fragments=1, grace_s=1.0)
    a, b, e = (HandSite(store, terms, name, clock, key=KEYS[name], founding=FOUNDING) for name in "abe")
    for site, value in ((a, 1.0), (b, 2.0), (e, 3.0)):
        offer = site.offer(0, value)
    room = MAX_RECORD_BYTES - len(offer.to_bytes())
    long = offer.model_copy(update={field: "x" * room})
    signed = long.model_copy(update={"signature": KEYS["e"].sign(long.message(e.run.sha256))})
    store.put(keys.offer(0, 0, "e"), signed.to_bytes())
    beating(clock, a, b, passes=9)
    assert a.replicas[0].history.voids == ()
    commit = commit_of(store)
    assert [entry.site for entry in commit.taken] == ["a", "b"]
    assert [entry.site for entry in commit.refused] == ["e"] and "xxx" in commit.refused[0].why


def test_what_a_commit_says_besides_of_an_offer_is_counted_as_long_as_it_can_be(store, clock):
    a = HandSite(store, make_terms(fragments=1), "a", clock)
    offer = a.offer(0, 1.0)
    factors = (float(np.nextafter(np.float32(x), np.float32(1))) for x in (0.1, 1e-5, 1e-38))
    longest = max(factors, key=lambda x: len(repr(x)))
    taken = Taken(offer=offer, multiplier=longest)
    assert len(taken.to_bytes()) + 1 <= len(offer.to_bytes()) + TAKEN_BYTES


def test_of_more_offers_than_a_record_has_room_for_a_round_takes_as_many_as_fit(store, clock, monkeypatch):
    terms = make_terms(fragments=1)
    sites = [HandSite(store, terms, name, clock) for name in "abcd"]
    for value, site in enumerate(sites):
        site.offer(0, value + 1.0)
    room = 4 * len(store.get(keys.offer(0, 0, "a")))
    monkeypatch.setattr("composer_prime.sync.rounds.MAX_RECORD_BYTES", SPARED_BYTES + room)
    closing(clock, *sites, passes=6)
    commit = commit_of(store)
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
    closing(clock, a)
    commit = commit_of(store)
    assert [entry.site for entry in commit.taken] == ["a"] and len(commit.refused) == MAX_REFUSED


# --- payloads that are what was signed, and yet none -----------------------------------------------------------------


ROUNDS = make_terms(fragments=1, rounds=9, grace_s=1.0)
SPOILED: dict[str, Callable[[np.ndarray], tuple[bytes, float]]] = {
    "a value that is none": lambda x: (np.concatenate([[np.float32(np.nan)], x[1:]]).tobytes(), 1.0),
    "a norm understated": lambda x: (x.tobytes(), 0.01),
}
"""-> bytes, and the factor to the norm"""


def commit_on(evil: HandSite, kind: str) -> Offer:
    """`evil` offers such a payload, and commits on it itself."""
    offer = evil.offer(0, 1.0)
    data, factor = SPOILED[kind](np.frombuffer(evil.store.get(str(offer.payload)), "<f4").copy())
    digests = (slice_digest(data),)
    sha, slices = root_sha256(digests), base64.b64encode(b"".join(digests)).decode()
    changed = {"payload": keys.payload(0, 0, evil.name, sha), "sha256": sha, "slices": slices}
    offer = offer.model_copy(update=changed | {"norms": (offer.norms[0] * factor,)})
    evil.store.put(str(offer.payload), data)
    evil.store.put(keys.offer(0, 0, evil.name), offer.to_bytes())
    evil.commit_taking(offer)
    return offer


def replica_of(site: HandSite) -> Replica:
    return Replica(site.store, site.run, 0, runtime=site.runtime, roster=site.roster, site="z")


@pytest.mark.parametrize("kind", SPOILED)
def test_a_commit_on_a_payload_that_is_none_is_a_void_round_for_everybody(store, clock, kind):
    a, e = HandSite(store, ROUNDS, "a", clock), HandSite(store, ROUNDS, "e", clock)
    before = a.replicas[0].master.sha256
    commit_on(e, kind)
    (closed,) = a.replicas[0].advance()
    assert closed.fault is not None and closed.fault.startswith("takes an offer of e it may not: slice 0 ")
    assert (a.replicas[0].version, a.replicas[0].master.sha256) == (1, before)
    a.hand_over(0, 2.0)
    closing(clock, a)
    late = replica_of(a)
    while late.advance():
        pass
    assert (late.version, late.history.voids) == (2, (0,))
    assert late.master.sha256 == a.replicas[0].master.sha256
    verifier = Verifier(store)
    assert verifier.check(0).num_void == 1
    verifier.close()


def test_a_round_waits_for_the_bytes_as_long_as_they_are_not_those_that_were_signed(store, clock):
    a, e = HandSite(store, ROUNDS, "a", clock), HandSite(store, ROUNDS, "e", clock)
    offer = commit_on(e, "a norm understated")
    data = store.get(str(offer.payload))
    store.put(str(offer.payload), bytes(len(data)))
    with pytest.raises(StoreError, match="can't be skipped"):
        a.replicas[0].advance()
    store.put(str(offer.payload), data)
    (closed,) = a.replicas[0].advance()
    assert closed.fault is not None


def test_what_was_read_for_one_offer_vouches_for_no_other_that_names_the_same_payload(store, clock):
    """One that has its norm right is read early; the commit takes another, with a norm that the clip lets pass."""
    a, b, e = (HandSite(store, ROUNDS, name, clock) for name in "abe")
    own, first = a.offer(0, 1.0), e.offer(0, 1000.0)
    a.replicas[0].merger.fetch(first)
    e.commit_taking(own, first.model_copy(update={"norms": (first.norms[0] * 1e-6,)}))
    for site in (a, b):
        (closed,) = site.replicas[0].advance()
        assert closed.fault is not None and "has norm" in closed.fault, site.name
    assert a.replicas[0].master.sha256 == b.replicas[0].master.sha256


def test_nor_does_what_a_site_knows_of_its_own_payload(store, clock):
    """Where nothing is signed anybody may write an offer in its name."""
    a, e = HandSite(store, ROUNDS, "a", clock), HandSite(store, ROUNDS, "e", clock)
    own = a.offer(0, 1.0)
    e.commit_taking(own.model_copy(update={"norms": (own.norms[0] * 2,)}))
    (closed,) = a.replicas[0].advance()
    assert closed.fault is not None and "has norm" in closed.fault


def test_a_round_that_is_void_for_all_is_no_fault_for_verify_whatever_its_offers_records_say(store, clock):
    e = HandSite(store, ROUNDS, "e", clock)
    offer = commit_on(e, "a norm understated")
    store.put(keys.offer(0, 0, "e"), offer.model_copy(update={"tokens": offer.tokens - 1}).to_bytes())
    e.replicas[0].advance()
    verifier = Verifier(store)
    assert verifier.check(0).num_void == 1
    verifier.close()


def at_the_edge(share: float) -> torch.Tensor:
    """Values whose squares make 1.00005 squared, or less where that share of the small ones is lost: in fp64 those are
    that are added to the large one one by one, in whichever order and in so many sums as a machine adds."""
    small = torch.full((2**16 - 4,), 1e-8)
    target, large = 1.00005**2 - (1 - share) * float(small.double().square().sum()), []
    for _ in range(4):
        large.append(np.nextafter(np.float32(np.sqrt(target)), np.float32(0)))
        target -= float(large[-1]) ** 2
    return torch.cat([torch.tensor(large), small])


def accepts(x: torch.Tensor, norm: float) -> bool:
    codec = get_codec("fp32")
    plan = plan_slices(x.numel(), 1, (codec,))
    coded = code(codec, x, plan)
    try:
        decode(codec, coded.data, coded.digests, (norm,), plan, 0, 1)
    except PayloadUnsound:
        return False
    return True


def test_whether_a_norm_is_right_hangs_on_no_order_in_which_a_machine_adds():
    for share in range(0, 20):
        x = at_the_edge(share / 20)
        real = float(torch.linalg.vector_norm(x.double()))
        near = [real * factor * (1 + 1e-15 * at) for factor in (1.0001, 0.9999) for at in (-1, 0, 1)]
        for norm in (1.0002, 1.0001, 1.0, *near):
            assert accepts(x, norm) == accepts(x.flip(0), norm), norm
        assert accepts(x, 1.0) and not accepts(x, 1.0002)


# --- the end: no member's word moves who starts again ----------------------------------------------------------------


def play_round(clock: list[float], *sites: HandSite) -> None:
    """One round."""
    version = sites[0].replicas[0].version
    for each in sites:
        each.courier.collect(0)
        each.hand_over(0, 1.0)
    while any(each.replicas[0].version == version for each in sites):
        for each in sites:
            each.beat()
            each.tick()
        clock[0] += 0.5
    for each in sites:
        each.tick()
        each.runtime.run_tasks()


def test_a_commit_that_a_member_puts_after_the_end_moves_nobody(store):
    clock, terms = [0.0], make_terms(fragments=1, grace_s=1.0)
    site = partial(HandSite, store, terms, clock=clock, founding=admitting("abc", OWNER))
    a, b, c = (site(name, key=KEYS[name]) for name in "abc")
    for _ in range(terms.final_version):
        play_round(clock, a, b)
    close = read_record(store, Close, keys.close())
    assert close.versions == (4,)
    c.courier.follow()
    known = {"base_sha": "ab" * 32, "previous": c.replicas[0].previous, "committer": "c"}
    assert store.create(keys.commit(0, 4), c.roster.sign(empty_commit(version=4, voids=(3,), **known)).to_bytes())
    back = site("a", key=KEYS["a"])
    assert back.courier.master(0).sha256 == close.masters[0] and back.replicas[0].history.voids == ()
    verifier = Verifier(store)
    assert verifier.check(0).last == 4
    verifier.close()


def test_a_close_record_that_a_member_puts_early_tells_no_site_that_starts_again_anything(store):
    clock, terms = [0.0], make_terms(fragments=1, rounds=9, snapshot_rounds=2, grace_s=1.0)
    site = partial(HandSite, store, terms, clock=clock, founding=admitting("abc", OWNER))
    a, c = (site(name, key=KEYS[name]) for name in "ac")
    for _ in range(5):
        play_round(clock, a, c)
    for version in (4, 10):
        early = Close(versions=(version,), masters=("ab" * 32,), voids=((version - 1,),), closed_by="c")
        store.put(keys.close(), c.roster.sign(early).to_bytes())
        back = site("a", key=KEYS["a"])
        assert back.replicas[0].history.voids == a.replicas[0].history.voids == ()
        assert back.courier.master(0).sha256 == a.courier.master(0).sha256
