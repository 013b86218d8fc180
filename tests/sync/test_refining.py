"""A site that begins with the upper halves of masters: near the others, of use, no judge; and soon as exact as they."""

import contextlib

import pytest
import torch
from torch import Tensor

from composer_prime.errors import ProtocolError, StoreError
from composer_prime.outer.fragments import trainable
from composer_prime.store import Store, keys
from composer_prime.sync import entering
from composer_prime.sync.beginning import FIRST_PIECE
from composer_prime.sync.ledger import FragmentLedger
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.records import Commit, Offer
from composer_prime.sync.returning import FragmentStand
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.snapshots import Master
from composer_prime.sync.validity import write_commit
from tests.patience import PATIENCE_S
from tests.sync.harness import HandSite, ThreadSite, empty_commit, make_terms
from tests.sync.test_beginning import SlowStore, net

TERMS = make_terms(rounds=40, snapshot_rounds=4, max_stale_rounds=2, grace_s=1.0, lr=0.7, fragments=1)


class Watched(SlowStore):
    """Reading takes time, if only a nanosecond a byte; some keys can't be read for a while."""

    unreadable = "nothing"

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if self.unreadable in key:
            raise StoreError(f"{key} can't be read")
        return super().get_range(key, start, length)

    def bytes_of(self, what: str) -> int:
        return sum(nbytes for key, nbytes in self.fetched.items() if what in key)


def movement(number: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(number)) * 1e-3


def round_of(offering: list[HandSite], *others: HandSite) -> None:
    """One round in which these sites have something to offer, until all have followed it."""
    version = offering[0].courier.versions()[0]
    for number, site in enumerate(offering):
        site.beat()
        site.hand_over(0, movement(10 * version + number, site.replicas[0].numel))
    everyone = [*offering, *others]
    for _ in range(20):
        for site in everyone:
            site.tick()
        offering[0].runtime.advance(0.5)
        if all(site.courier.versions()[0] > version for site in everyone):
            break
    assert all(site.courier.versions()[0] == version + 1 for site in everyone)
    for site in offering:
        assert site.courier.collect(0)[1] is not None


def founder(store: Store, clock: list[float], num_rounds: int, **changes) -> HandSite:
    site = HandSite(store, TERMS.model_copy(update=changes), "a", clock, net=net())
    for _ in range(num_rounds):
        round_of([site])
    site.tick()
    return site


def joiner(store: Store, clock: list[float], name: str = "b", **changes) -> HandSite:
    slow = store if isinstance(store, Watched) else Watched(store, clock, 1e-9)
    site = HandSite(slow, TERMS.model_copy(update=changes), name, clock, net=net(1), patience_s=0.0)
    assert site.courier.is_coarse()
    return site


def commit_of(store: Store, version: int) -> Commit:
    key = keys.commit(0, version)
    return Commit.from_bytes(store.get(key), key)


def offer_of(store: Store, version: int, site: str) -> Offer:
    key = keys.offer(0, version, site)
    return Offer.from_bytes(store.get(key), key)


def offered(store: Store, version: int) -> set[str]:
    return {keys.offer_site(key) for key in store.list(keys.offers_prefix(0, version)) if keys.is_offer(key)}


def assert_near(coarse: Master, exact: Master) -> None:
    assert coarse.coarse and coarse.version == exact.version
    assert not torch.equal(coarse.weights, exact.weights)
    assert ((coarse.weights - exact.weights).abs() <= exact.weights.abs() * 2.0**-7 + 1e-4).all()


def test_it_follows_the_log_near_the_others_and_is_exactly_theirs_once_the_lower_half_has_come(store, clock):
    a = founder(store, clock, 6)
    b = joiner(store, clock)
    assert_near(b.courier.master(0), a.courier.master(0))
    for _ in range(3):
        round_of([a], b)
        assert_near(b.courier.master(0), a.courier.master(0))
    with pytest.raises(ProtocolError, match="is coarse"):
        _ = b.courier.master(0).sha256
    b.courier.refine()
    assert not b.courier.is_coarse()
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256
    round_of([a], b)
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256


def test_outer_momentum_comes_in_halves_too(store, clock):
    a = founder(store, clock, 5, momentum=0.5)
    b = joiner(store, clock, momentum=0.5)
    round_of([a], b)
    assert_near(b.courier.master(0), a.courier.master(0))
    b.courier.refine()
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256


def test_its_work_is_merged_before_its_masters_are_whole_and_vouches_for_none(store, clock):
    a = founder(store, clock, 5)
    b = joiner(store, clock)
    round_of([a, b])
    taken = {entry.site: entry.offer.base_sha for entry in commit_of(store, 5).taken}
    assert taken == {"a": commit_of(store, 5).base_sha, "b": None}
    assert_near(b.courier.master(0), a.courier.master(0))
    b.courier.refine()
    round_of([a, b])
    assert offer_of(store, 6, "b").base_sha == commit_of(store, 6).base_sha
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256


def test_alone_it_neither_offers_nor_commits_until_its_masters_are_whole(store, clock):
    founder(store, clock, 5)
    b = joiner(store, clock)
    b.hand_over(0, movement(1, b.replicas[0].numel))
    for _ in range(5):
        b.tick()
        clock[0] += 100.0
    assert offered(store, 5) == set()
    b.courier.refine()
    b.tick(3)
    assert offered(store, 5) == {"b"} and b.courier.versions() == (6,)


def test_it_offers_only_once_a_quorum_of_others_has(store, clock):
    a = founder(store, clock, 5, quorum=1)
    b = joiner(store, clock)
    b.hand_over(0, movement(1, b.replicas[0].numel))
    b.tick(2)
    assert offered(store, 5) == set()
    b.beat()
    a.hand_over(0, movement(2, a.replicas[0].numel))
    a.runtime.run_tasks()
    a.courier.tick()
    assert offered(store, 5) == {"a"}
    b.tick(2)
    assert offered(store, 5) == {"a", "b"}


def test_it_never_closes_a_round_though_everyone_has_offered(store, clock):
    a = founder(store, clock, 5)
    b = joiner(store, clock)
    a.beat()
    b.beat()
    a.hand_over(0, movement(2, a.replicas[0].numel))
    b.hand_over(0, movement(1, b.replicas[0].numel))
    a.runtime.run_tasks()
    a.courier.tick()
    assert offered(store, 5) == {"a"}
    for _ in range(5):
        b.tick()
        clock[0] += 20.0
    assert offered(store, 5) == {"a", "b"} and not store.list(keys.commit(0, 5))
    b.courier.refine()
    b.tick(3)
    assert {entry.site for entry in commit_of(store, 5).taken} == {"a", "b"}


def test_what_it_may_still_need_stays_pinned_until_it_has_it(store, clock):
    a = founder(store, clock, 6)
    b = joiner(store, clock)
    round_of([a], b)
    assert (b.courier.versions(), b.courier.pins()) == ((7,), (4,))
    b.courier.refine()
    assert b.courier.pins() == (7,)


def test_no_round_is_fetched_twice(store, clock):
    a = founder(store, clock, 5, codec="int8")
    watched = Watched(store, clock, 1e-6)
    b = joiner(watched, clock, codec="int8")
    for _ in range(2):
        round_of([a], b)
    payloads = watched.bytes_of("/payload/")
    assert payloads == sum(len(store.get(commit_of(store, version).taken[0].payload)) for version in (4, 5, 6))
    b.courier.refine()
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256
    assert watched.bytes_of("/payload/") == payloads
    (snapshot,) = [key for key in watched.fetched if keys.is_master(key) and keys.parse_master(key)[1] == 4]
    assert watched.fetched[snapshot] < len(store.get(snapshot)) + FIRST_PIECE + 1000


@pytest.mark.parametrize("damage", ["gone", "cut", "other bytes"])
def test_a_snapshot_whose_lower_half_is_lost_is_made_good_from_another_one(store, clock, damage):
    a = founder(store, clock, 6)
    b = joiner(store, clock)
    (key,) = [key for key in store.list(keys.masters_prefix(0)) if keys.parse_master(key)[1] == 4]
    data = bytearray(store.get(key))
    if damage == "gone":
        store.delete(key)
    else:
        data[1000] ^= 1
        store.put(key, bytes(data[:2000] if damage == "cut" else data))
    b.courier.refine()
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256


def test_a_store_that_fails_meanwhile_is_asked_again_and_the_half_that_came_is_not(store, clock):
    a = founder(store, clock, 5)
    watched = Watched(store, clock, 1e-9)
    b = joiner(watched, clock)
    watched.unreadable = "masters/"
    with pytest.raises(StoreError):
        b.courier.refine()
    watched.unreadable = "nothing"
    b.courier.refine(lambda: False)
    assert b.courier.is_coarse()
    b.courier.refine()
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256


def test_it_calls_no_commit_void_but_waits_until_it_can_tell(store, clock):
    a = founder(store, clock, 5)
    b = joiner(store, clock)
    round_of([a], b)
    forged = commit_of(store, 5).model_copy(update={"version": 6, "voids": (5,)})
    assert store.create(keys.commit(0, 6), forged.to_bytes())
    b.tick(3)
    assert b.courier.versions() == (6,)
    b.courier.refine()
    b.tick()
    a.tick()
    assert b.courier.versions() == a.courier.versions() == (7,)
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256


def test_in_doubt_with_the_log_behind_it_gone_it_goes_on_from_a_newer_snapshot(store, clock):
    """It slept longer than its pins hold: nothing is left that tells whether the commit that it doubts is void."""
    forgetful = {"keep_log": False, "liveness_s": 5.0}
    a = founder(store, clock, 5, **forgetful)
    b = joiner(store, clock, **forgetful)
    round_of([a], b)
    forged = commit_of(store, 5).model_copy(update={"version": 6, "voids": (5,)})
    assert store.create(keys.commit(0, 6), forged.to_bytes())
    b.tick(3)
    assert b.courier.versions() == (6,)
    a.tick()
    clock[0] += 10.0
    for _ in range(14):
        round_of([a])
    assert min(keys.parse_master(key)[1] for key in store.list(keys.masters_prefix(0))) > 6
    for _ in range(5):
        with contextlib.suppress(StoreError):
            b.courier.refine()
        b.tick(2)
    assert not b.courier.is_coarse()
    assert b.courier.versions() == a.courier.versions() == (21,)
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256


def spoil(store: Store, version: int, site: str) -> None:
    """Other bytes, where all have read the right ones."""
    payload = next(entry.payload for entry in commit_of(store, version).taken if entry.site == site)
    store.put(payload, bytes(len(store.get(payload))))


def test_it_becomes_whole_by_a_newer_snapshot_where_a_round_since_its_own_is_spoiled(store, clock):
    a, b = founder(store, clock, 6), joiner(store, clock)
    c = HandSite(store, TERMS, "c", clock, net=net())
    for _ in range(2):
        round_of([a, c], b)
    spoil(store, 7, "a")
    for _ in range(8):
        round_of([a, c], b)
        for site in (a, c):
            site.tick()
        with contextlib.suppress(StoreError):
            b.courier.refine()
    assert not b.courier.is_coarse()
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256


def test_one_that_finds_a_whole_master_on_entering_pins_nothing_older(store, clock, monkeypatch):
    """A round behind the snapshot whose upper half it fetches is spoiled meanwhile, and a newer snapshot stands."""
    a = founder(store, clock, 6)
    begin = entering.begin

    def begin_slowly(*args, **options):
        found = begin(*args, **options)
        for _ in range(4):
            round_of([a])
        a.tick()
        spoil(store, 6, "a")
        return found

    monkeypatch.setattr(entering, "begin", begin_slowly)
    slow = Watched(store, clock, 1e-9)
    b = HandSite(slow, TERMS, "b", clock, net=net(1), patience_s=0.0)
    assert not b.courier.is_coarse() and b.courier.versions() == (10,)
    assert b.courier.pins() == b.courier.versions()


def test_one_that_comes_back_behind_a_commit_that_it_doubts_is_whole_before_it_stands_anywhere(store, clock):
    """Alone, say after a restart of the whole run: no newer snapshot will come by itself."""
    a = founder(store, clock, 5, momentum=0.9)
    replica = a.replicas[0]
    known = {"base_sha": replica.master.sha256, "previous": replica.previous}
    assert store.create(keys.commit(0, 5), empty_commit(version=5, voids=(3,), committer="m", **known).to_bytes())
    a.tick(3)
    round_of([a])
    own = net(1)
    params = LocalParameters(dict(trainable(own.named_parameters())))
    params.write(a.run.fragments[0], replica.master.weights - 0.25)
    saved = FragmentStand(7, replica.master.weights.clone(), ledger=FragmentLedger(trained=70, merged=60))
    slow = Watched(store, clock, 1e-9)
    coarse = HandSite(slow, a.run.terms, "a", clock, net=net(1), patience_s=0.0)
    assert coarse.courier.is_coarse() and coarse.courier.versions() == (5,)
    outer = OuterLoop(slow, a.run.terms, run="run", site="a", exact_join_s=0.0)
    outer.load_state_dict({"run": a.run.sha256, "step": 28, "fragments": [saved.to_dict()]})
    outer.join(own.named_parameters())
    try:
        (stand,) = outer.state_dict()["fragments"]
        assert (stand["version"], stand["ledger"]["trained"], stand["ledger"]["merged"]) == (7, 70, 60)
        assert torch.allclose(params.read(a.run.fragments[0]), replica.master.weights - 0.25)
    finally:
        outer.close()


def test_a_commit_on_another_master_leads_it_astray_by_one_round_and_it_says_so(store, clock):
    """A quorum would have to vouch for that master; who is whole calls the round void."""
    a = founder(store, clock, 5)
    b = joiner(store, clock)
    a.hand_over(0, movement(9, a.replicas[0].numel))
    a.runtime.run_tasks()
    a.courier._bring(0)
    wrong = offer_of(store, 5, "a").model_copy(update={"base_sha": "0" * 64})
    commit = write_commit(
        facts=a.replicas[0].coding.facts,
        version=5,
        base_sha="0" * 64,
        previous=a.replicas[0].previous,
        take={"a": wrong},
        refused={},
        voids=(),
        terms=a.run.terms,
        guests=(),
        admissions=0,
        admission_sha=None,
        committer="a",
        incarnation=a.incarnation,
    )
    assert store.create(keys.commit(0, 5), commit.to_bytes())
    b.tick()
    a.tick()
    assert b.courier.versions() == a.courier.versions() == (6,)
    assert a.replicas[0].history.voids == (5,) and b.replicas[0].history.voids == ()
    with pytest.raises(ProtocolError, match="took a round before version 6 for sound that the log calls void"):
        b.courier.refine()


def test_sites_end_with_equal_masters_and_parameters_though_one_joined_by_halves(store, caplog):
    caplog.set_level("INFO", logger="composer_prime")
    terms = make_terms(rounds=30)
    first = ThreadSite(store, terms, "a")
    late = ThreadSite(store, terms, "b", seed=1, data_seed=1, exact_join_s=0.0)
    first.after_join = late.start
    first.start()
    first.join(PATIENCE_S)
    late.join(PATIENCE_S)
    assert first.error is None and late.error is None
    for fragment in range(terms.fragments):
        assert f"begins fragment={fragment} at=upper" in caplog.text
        assert f"master_whole fragment={fragment}" in caplog.text
    assert first.summary["masters"] == late.summary["masters"]
    assert all(torch.equal(p, q) for p, q in zip(first.net.parameters(), late.net.parameters(), strict=True))
