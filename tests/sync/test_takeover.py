"""Rule 1: who is admitted may store a master of its own making and commit on it; who follows the log doesn't move."""

import pytest
import torch

from composer_prime.errors import MasterMismatch, StoreError
from composer_prime.store import Store, keys
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.records import Commit
from composer_prime.sync.replica import rebuild_master
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.snapshots import Master, store_master
from composer_prime.sync.start import Founding
from tests.sync.harness import HandSite, empty_commit, make_terms

KEYS = {name: SigningKey.from_bytes(name.encode() * 32) for name in "abe"}
FOUNDING = Founding(keys={name: key.public for name, key in KEYS.items()})


def entered(store: Store, clock: list[float], **changes: int) -> tuple[HandSite, HandSite, HandSite]:
    """Two honest sites and one that isn't, whose first round has closed."""
    terms = make_terms(**({"fragments": 1, "grace_s": 1.0, "rounds": 9, "snapshot_rounds": 9} | changes))
    a, b, e = (HandSite(store, terms, name, clock, key=KEYS[name], founding=FOUNDING) for name in "abe")
    a.hand_over(0, 1.0)
    to_version(clock, 1, a, b, e)
    return a, b, e


def to_version(clock: list[float], version: int, *sites: HandSite) -> None:
    for _ in range(9):
        for site in sites:
            site.beat()
            site.tick()
        clock[0] += 1.0
    assert {site.courier.versions()[0] for site in sites} == {version}


def own_master(site: HandSite) -> Master:
    """A master of its own making for the open round."""
    return Master(0, site.replicas[0].version, torch.full((site.replicas[0].numel,), 7.0), None)


def commit_on(site: HandSite, base_sha: str, *, version: int, previous: str, voids: tuple[int, ...] = ()) -> Commit:
    """Create a commit that takes nothing and says so much of the rounds before."""
    plain = empty_commit(version=version, base_sha=base_sha, previous=previous, voids=voids, committer=site.name)
    commit = plain.model_copy(update={"signature": KEYS[site.name].sign(plain.message(site.run.sha256))})
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
    e.hand_over(0, 1.0)
    e.runtime.run_tasks()
    e.courier._bring(0)
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
    e.hand_over(0, 2.0)
    e.runtime.run_tasks()
    e.courier._bring(0)
    clock[0] += 61.0  # it is alone, and nobody else has offered
    for _ in range(3):
        e.courier._members.observe()
        if not e.courier._closer.serve(e.replicas[0]):
            clock[0] += 1.0
    commit = Commit.from_bytes(store.get(keys.commit(0, 1)), "commit")
    store.delete(commit.taken[0].payload)
    own = Master(0, 2, torch.full((a.replicas[0].numel,), 7.0), None)
    commit_on(e, own.sha256, version=2, previous=sha256_hex(commit.to_bytes()))
    store_master(store, own)
    with pytest.raises(StoreError, match="no object at"):
        a.courier.follow()
    assert (a.replicas[0].version, a.replicas[0].master.sha256) == (1, honest)
