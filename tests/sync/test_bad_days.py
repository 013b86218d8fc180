"""What may befall a bucket under a live run: errors, expired credentials, huge records, loss. No work is lost by it."""

import threading
from dataclasses import replace
from typing import Any, cast

import pytest

from composer_prime.errors import (
    ConfigError,
    CorruptObject,
    KeyMissing,
    MasterMismatch,
    RunGone,
    StoreError,
    StoreUnusable,
)
from composer_prime.store import Store, keys
from composer_prime.store.file import FileStore
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.canonical import MAX_RECORD_BYTES
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Beat, Offer
from tests.patience import PATIENCE_S
from tests.store.faulty_store import FaultPlan, FaultyStore, WriteLog
from tests.sync.harness import HandSite, ThreadSite, assert_fates_add_up, make_terms, run_sites, shas, start_together

FAULTS = FaultPlan(
    error_before=0.1,
    error_after=0.1,
    torn=0.1,
    own_retry=0.1,
    latency=0.2,
    latency_s=0.01,
    stale_list=0.2,
    stale_operations=5,
)
"""All that a sound store over a bad network may show: requests and answers lost, torn, repeated, late; late lists."""


class LaterFaulty:
    """A store that is sound until it is told to be faulty; it counts what failed since."""

    def __init__(self, inner: Store, seed: int, writes: WriteLog) -> None:
        self._sound, self._faulty = inner, FaultyStore(inner, replace(FAULTS, seed=seed), writes=writes)
        self.is_faulty, self.num_failed = False, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._faulty if self.is_faulty else self._sound, name)
        if not callable(call):
            return call

        def counted(*args: Any) -> Any:
            try:
                return call(*args)
            except KeyMissing:
                raise
            except StoreError:
                self.num_failed += 1
                raise

        return counted


def test_a_store_that_fails_now_and_then_loses_nothing_and_stops_nobody(store, monkeypatch):
    monkeypatch.setattr("composer_prime.sync.driver.RETRY_S", 0.02)
    writes = WriteLog()
    faulty = [LaterFaulty(store, seed, writes) for seed in range(2)]
    terms = make_terms(sync_delay=1, rounds=4)
    sites = [
        ThreadSite(cast(Store, one), terms, name, data_seed=index)
        for index, (one, name) in enumerate(zip(faulty, "ab", strict=True))
    ]
    for site, one in zip(sites, faulty, strict=True):
        site.after_join = lambda one=one: setattr(one, "is_faulty", True)
    run_sites(*sites)
    assert min(one.num_failed for one in faulty) > 5
    assert shas(sites[0]) == shas(sites[1])
    for site in sites:
        assert_fates_add_up(site)


def test_a_share_that_vanishes_and_returns_holds_sites_up_and_they_end_alike(tmp_path, monkeypatch):
    monkeypatch.setattr("composer_prime.sync.driver.RETRY_S", 0.02)
    share, away = tmp_path / "share", tmp_path / "away"
    stores = [LaterFaulty(FileStore(share / "run"), 0, WriteLog()) for _ in range(2)]
    terms = make_terms(sync_delay=1, rounds=8, quorum=2, grace_s=60.0, liveness_s=1.0)
    a, b = (ThreadSite(cast(Store, stores[index]), terms, "ab"[index], data_seed=index) for index in range(2))
    start_together(a, b)
    while not FileStore(share / "run").list(keys.offers_prefix(0, 2)):
        a.join(0.005)
        assert a.is_alive() and b.is_alive()
    share.rename(away)
    while min(one.num_failed for one in stores) < 50:
        a.join(0.005)
        assert a.is_alive() and b.is_alive() and not share.exists()
    away.rename(share)
    for site in (a, b):
        site.join(PATIENCE_S)
        assert site.error is None and site.outer.finished
        assert_fates_add_up(site)
        assert [ledger["dropped"] for ledger in site.summary["tokens"]] == [0, 0]
    assert shas(a) == shas(b)


def empty_until_missed(store, monkeypatch) -> None:
    """Delete all that the bucket holds, and wait until a site has looked for the manifest: it could end before."""
    missed, read = threading.Event(), MemoryStore.get_range

    def watched(self: MemoryStore, key: str, start: int, length: int) -> bytes:
        try:
            return read(self, key, start, length)
        except KeyMissing:
            if key == keys.manifest():
                missed.set()
            raise

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "get_range", watched)
        for key in store.list(""):
            store.delete(key)
        assert missed.wait(PATIENCE_S)


def test_after_a_bucket_was_emptied_and_restored_a_site_goes_on_from_its_checkpoint(store, monkeypatch):
    monkeypatch.setattr("composer_prime.sync.driver.RETRY_S", 0.02)
    monkeypatch.setattr("composer_prime.sync.driver.DENIED_S", 0.1)
    terms = make_terms(sync_delay=1, rounds=12, liveness_s=0.2)
    first = ThreadSite(store, terms, "a", stop_after=13)
    run_sites(first)
    backup = {key: store.get(key) for key in store.list("")}
    emptied = ThreadSite(store, terms, "a", state=first.saved)
    emptied.after_join = lambda: empty_until_missed(store, monkeypatch)
    with pytest.raises(RunGone, match="This site's checkpoint is intact: restore the bucket"):
        run_sites(emptied)
    for key in store.list(""):
        store.delete(key)
    with pytest.raises(ConfigError, match="holds no run any more, and this site's checkpoint is of one: restore"):
        run_sites(ThreadSite(store, terms, "a", state=first.saved))
    assert store.list("") == []
    run_sites(ThreadSite(store, make_terms(rounds=1), "b", seed=3))
    with pytest.raises(ConfigError, match="holds another run than this site's checkpoint is of"):
        run_sites(ThreadSite(store, terms, "a", state=first.saved))
    for key in store.list(""):
        store.delete(key)
    for key, data in backup.items():
        store.put(key, data)
    again = ThreadSite(store, terms, "a", state=first.saved)
    run_sites(again)
    assert again.outer.finished
    assert [master["version"] for master in again.summary["masters"]] == [13, 13]
    for ledger in again.summary["tokens"]:
        assert (ledger["merged"], ledger["dropped"]) == (ledger["trained"], 0)


@pytest.mark.parametrize("error", [StoreUnusable("no answer within 20 s"), StoreError("503")])
def test_a_store_that_is_down_when_a_site_comes_back_is_not_taken_for_one_that_was_emptied(store, monkeypatch, error):
    """Who starts it again must hear of an outage, not be told to restore a bucket that lacks nothing."""
    first = ThreadSite(store, make_terms(rounds=12), "a", stop_after=5)
    run_sites(first)
    again = ThreadSite(store, make_terms(rounds=12), "a", state=first.saved)
    with monkeypatch.context() as patch:

        def down(*_: object) -> bytes:
            raise error

        patch.setattr(MemoryStore, "get_range", down)
        patch.setattr(MemoryStore, "get", down)
        with pytest.raises(type(error), match=str(error)):
            run_sites(again)
    run_sites(ThreadSite(store, make_terms(rounds=12), "a", state=first.saved))


@pytest.mark.parametrize("what", ["an offer", "a beat"])
def test_a_record_that_is_too_large_is_not_read_and_stops_nobody(store, what):
    sites = [ThreadSite(store, make_terms(rounds=3), name, data_seed=index) for index, name in enumerate("ab")]
    huge = b"{" + b" " * MAX_RECORD_BYTES + b"}"
    place = {"an offer": keys.offer(0, 1, "z"), "a beat": keys.beat("z", 0)}[what]
    sites[0].after_join = lambda: store.put(place, huge)
    run_sites(*sites)
    with pytest.raises(CorruptObject, match=f"a record at most {MAX_RECORD_BYTES}: it is not read"):
        read_record(store, Offer if what == "an offer" else Beat, place)
    assert shas(sites[0]) == shas(sites[1])
    for site in sites:
        assert_fates_add_up(site)


def test_who_reads_a_commit_that_was_damaged_after_others_read_it_is_told_how_to_find_it(store, clock):
    """It isn't this machine that computes differently."""
    terms = make_terms(fragments=1, rounds=5)
    early, late = (HandSite(store, terms, name, clock) for name in "ab")
    early.hand_over(0, 1.0)
    clock[0] += terms.liveness_s + 1.0
    for _ in range(2):
        early.beat()
        early.tick()
        clock[0] += terms.grace_s + 1.0
    assert early.courier.versions() == (1,)
    early.courier.collect(0)
    store.put(keys.commit(0, 0), b"damaged")
    early.hand_over(0, 2.0)
    for _ in range(3):
        early.beat()
        early.tick()
        clock[0] += terms.grace_s + 1.0
    assert early.courier.versions() == (2,)
    with pytest.raises(MasterMismatch, match="or the log was changed"):
        late.courier.follow()
        late.courier.follow()
