"""Rule 14: in a run that admits keys, what isn't signed by its site counts for nothing."""

import pytest
import torch

from composer_prime.errors import ConfigError, MasterMismatch, StoreError
from composer_prime.store import Store, keys
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.records import Beat, Claim, Commit
from composer_prime.sync.replica import rebuild_master
from composer_prime.sync.snapshots import Master, store_master
from tests.sync.harness import KEYS, HandSite, admitting, beating, closing, commit_of, empty_commit, make_terms

FOUNDING = admitting("abce")


@pytest.mark.parametrize(
    ("site", "key", "word"), [("a", None, "key_file"), ("a", "b", "admitted with"), ("z", "a", "not admitted")]
)
def test_a_process_without_the_admitted_key_of_its_name_is_refused_before_it_writes(store, clock, site, key, word):
    HandSite(store, make_terms(), "b", clock, key=KEYS["b"], founding=FOUNDING)
    with pytest.raises(ConfigError, match=word):
        HandSite(store, make_terms(), site, clock, key=KEYS.get(key), founding=FOUNDING)
    assert not store.list(keys.site_prefix(site))


@pytest.mark.parametrize("forgery", ["unsigned", "other key", "edited", "other run"])
def test_an_offer_without_its_sites_signature_is_refused(store, clock, forgery):
    a, b = (HandSite(store, make_terms(grace_s=2.0), name, clock, key=KEYS[name], founding=FOUNDING) for name in "ab")
    a.offer(0, 1.0)
    record = b.offer(0, 2.0)
    change = {
        "unsigned": {"signature": None},
        "other key": {"signature": KEYS["c"].sign(record.message(b.run.sha256))},
        "edited": {"tokens": 9},
        "other run": {"signature": KEYS["b"].sign(record.message("0" * 64))},
    }[forgery]
    store.put(keys.offer(0, 0, "b"), record.model_copy(update=change).to_bytes())
    closing(clock, a, passes=8)
    commit = commit_of(store)
    assert [entry.site for entry in commit.taken] == ["a"]
    assert [entry.site for entry in commit.refused] == ["b"] and "sign" in commit.refused[0].why


def test_an_outsider_can_neither_pose_as_live_nor_take_a_name_over(store, clock):
    a = HandSite(store, make_terms(), "a", clock, key=KEYS["a"], founding=FOUNDING)
    beat = Beat(
        site="b", incarnation=0, counter=1, state="live", versions=(0, 0), inner_step=0, trained_tokens=0, pins=(0, 0)
    )
    store.create(keys.claim("b", 0), Claim(site="b", incarnation=0, nonce="", host="", pid=1).to_bytes())
    store.put(keys.beat("b", 0), beat.to_bytes())
    store.create(keys.claim("a", 7), Claim(site="a", incarnation=7, nonce="", host="", pid=1).to_bytes())
    members = a.courier._members
    members.observe()
    assert members.live(0.0) == {"a"}
    a.pulse.check()  # no Superseded


def test_an_offer_of_a_process_that_was_replaced_is_refused_once_its_successor_beats(store, clock):
    a, old = (HandSite(store, make_terms(grace_s=1.0), name, clock) for name in "ab")
    old.offer(0, 2.0)
    HandSite(store, make_terms(grace_s=1.0), "b", clock)
    a.hand_over(0, 1.0)
    closing(clock, a)
    clock[0] += 100.0
    a.beat()
    closing(clock, a)
    commit = commit_of(store)
    assert [entry.site for entry in commit.taken] == ["a"] and "has taken over" in commit.refused[0].why


def test_an_offer_of_a_process_that_was_replaced_holds_no_round_up(store, clock):
    terms = make_terms(quorum=2, grace_s=1.0)
    a, old, silent = (HandSite(store, terms, name, clock) for name in "abc")
    old.offer(0, 2.0)
    new = HandSite(store, terms, "b", clock)  # it can offer nothing: the key is taken
    a.hand_over(0, 1.0)
    for _ in range(3):
        for site in (a, new, silent):
            site.beat()
        closing(clock, a)
    commit = commit_of(store)
    assert commit.taken == () and [entry.site for entry in commit.refused] == ["b"]
    settled = a.courier.collect(0)[1]
    assert settled is not None and settled.outcome in ("missed", "void"), "a keeps its work, for the next round"


def test_clipped_offers_of_a_thousand_times_the_norm_move_a_master_no_more_than_honest_ones(store, clock):
    terms = make_terms(aggregate="clipped", clip=1.0, weighting="equal")
    a, b, c = (HandSite(store, terms, name, clock) for name in "abc")
    start = a.courier.master(0).weights
    for site, value in ((a, 1.0), (b, 1.1), (c, 1000.0)):
        site.hand_over(0, value)
    closing(clock, a, b, c)
    moved = (start - a.courier.master(0).weights).abs().max()
    assert a.courier.versions()[0] == 1 and float(moved) <= 1.1 + 1e-4


@pytest.mark.parametrize("copycat", ["0", "z"])
def test_of_two_equal_offers_that_of_the_site_whose_work_was_merged_before_counts(store, clock, copycat):
    names = ("a", "b", copycat)
    a, b, thief = (HandSite(store, make_terms(grace_s=1.0), name, clock) for name in names)
    generator = torch.Generator().manual_seed(1)
    for version in range(2):
        for site in (a, b):
            site.beat()
            movement = torch.randn(a.replicas[0].numel, generator=generator)
            site.hand_over(0, movement)
        if version:
            thief.hand_over(0, movement)  # b's
        for site in (thief, b):
            site.bring()
        closing(clock, a, passes=12)
        for site in (a, b, thief):
            site.courier.follow()
            site.courier.collect(0)
    commit = commit_of(store, 1)
    assert [entry.site for entry in commit.taken] == ["a", "b"]
    assert [(entry.site, entry.why) for entry in commit.refused] == [(copycat, "equals the offer of b: a copy")]


# --- masters of a site's own making (rule 1) -------------------------------------------------------------------------


def entered(store: Store, clock: list[float], **changes: int) -> tuple[HandSite, HandSite, HandSite]:
    """Two honest sites and one that isn't, whose first round has closed."""
    terms = make_terms(**({"fragments": 1, "grace_s": 1.0, "rounds": 9, "snapshot_rounds": 9} | changes))
    a, b, e = (HandSite(store, terms, name, clock, key=KEYS[name], founding=FOUNDING) for name in "abe")
    a.hand_over(0, 1.0)
    to_version(clock, 1, a, b, e)
    return a, b, e


def to_version(clock: list[float], version: int, *sites: HandSite) -> None:
    beating(clock, *sites, passes=9)
    assert {site.courier.versions()[0] for site in sites} == {version}


def own_master(site: HandSite) -> Master:
    """A master of its own making for the open round."""
    return Master(0, site.replicas[0].version, torch.full((site.replicas[0].numel,), 7.0), None)


def commit_on(site: HandSite, base_sha: str, *, version: int, previous: str, voids: tuple[int, ...] = ()) -> Commit:
    """Create a commit that takes nothing and says so much of the rounds before."""
    plain = empty_commit(version=version, base_sha=base_sha, previous=previous, voids=voids, committer=site.name)
    commit = site.roster.sign(plain)
    assert site.store.create(keys.commit(0, version), commit.to_bytes())
    return commit


@pytest.mark.parametrize("stored", ["before it is read", "after it is read"])
def test_a_commit_on_a_stored_master_of_its_sites_own_making_is_a_void_round(store, clock, stored):
    a, b, e = entered(store, clock)
    own, honest = own_master(e), a.courier.master(0).sha256
    commit_on(e, own.sha256, version=1, previous=e.replicas[0].previous)
    if stored == "after it is read":
        b.courier.follow()
    store_master(store, own)
    for site in (a, b):
        site.courier.follow()
        assert site.replicas[0].history.voids == (1,)
        assert (site.courier.master(0).version, site.courier.master(0).sha256) == (2, honest)


def test_nor_does_a_later_commit_that_hides_the_void_one_move_anybody(store, clock):
    """Its site offers on that master, too, before any other site has offered: they doubt theirs, and stop."""
    a, b, e = entered(store, clock)
    own, honest = own_master(e), a.courier.master(0).sha256
    first = commit_on(e, own.sha256, version=1, previous=e.replicas[0].previous)
    for site in (a, b):
        site.courier.follow()
    store_master(store, own)
    e.replicas[0].master = own.unchanged()
    e.offer(0, 1.0)
    commit_on(e, own.sha256, version=2, previous=sha256_hex(first.to_bytes()))
    for site in (a, b):
        with pytest.raises(MasterMismatch):
            site.courier.follow()
        assert (site.replicas[0].version, site.replicas[0].master.sha256) == (2, honest)


def test_who_starts_again_with_a_wrong_master_rebuilds_it_past_a_commit_that_was_void_for_its_base(store, clock):
    a, b, e = entered(store, clock)
    commit_on(e, "f" * 64, version=1, previous=e.replicas[0].previous)
    for version in (2, 3):
        a.courier.follow()
        a.courier.collect(0)
        a.hand_over(0, 1.0)
        to_version(clock, version + 1, a, b)
    good = a.courier.master(0)
    assert a.replicas[0].history.voids == (1,) and good.version == 4
    assert rebuild_master(store, a.run, 0, 4, runtime=a.runtime, roster=a.roster).sha256 == good.sha256
    b.replicas[0].master = Master(0, 4, good.weights + 1, None)
    a.courier.collect(0)
    a.hand_over(0, 1.0)
    to_version(clock, 5, a)
    with pytest.raises(MasterMismatch, match="started again, it rebuilds its masters from snapshot and log"):
        b.courier.follow()
    again = HandSite(store, b.run.terms, "b", clock, key=KEYS["b"], founding=FOUNDING)
    assert again.courier.master(0).sha256 == a.courier.master(0).sha256


def test_who_took_its_own_commit_on_a_wrong_master_for_sound_stops_and_calls_no_other_void(store, clock):
    a, b, e = entered(store, clock)
    wrong = Master(0, 1, a.courier.master(0).weights + 1, None)
    e.replicas[0].master = wrong
    commit_on(e, wrong.sha256, version=1, previous=e.replicas[0].previous)
    for site in (a, b, e):
        site.courier.follow()
        site.courier.collect(0)
    assert (e.replicas[0].history.voids, a.replicas[0].history.voids) == ((), (1,))
    b.hand_over(0, 2.0)
    to_version(clock, 3, a, b)
    with pytest.raises(MasterMismatch, match="This site stops: started again"):
        e.courier.follow()
    assert e.replicas[0].version == 2


def test_a_commit_whose_payload_is_kept_back_makes_nobody_jump_to_a_master_of_its_sites_own_making(store, clock):
    a, _, e = entered(store, clock)
    honest = a.courier.master(0).sha256
    for site in (a, e):
        site.beat()
    e.offer(0, 2.0)
    clock[0] += 61.0  # it is alone, and nobody else has offered
    for _ in range(3):
        e.courier._members.observe()
        if not e.courier._closer.serve(e.replicas[0]):
            clock[0] += 1.0
    commit = commit_of(store, 1)
    store.delete(commit.taken[0].payload)
    own = Master(0, 2, torch.full((a.replicas[0].numel,), 7.0), None)
    commit_on(e, own.sha256, version=2, previous=sha256_hex(commit.to_bytes()))
    store_master(store, own)
    with pytest.raises(StoreError, match="no object at"):
        a.courier.follow()
    assert (a.replicas[0].version, a.replicas[0].master.sha256) == (1, honest)
