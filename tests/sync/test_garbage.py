"""Rule 13: what nobody needs goes, and nobody is ever cut off by it."""

import threading
from dataclasses import replace

import pytest
import torch

from composer_prime.errors import StoreError
from composer_prime.store import Store, keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync import replica
from composer_prime.sync.garbage import collect_garbage
from composer_prime.sync.members import Members
from composer_prime.sync.owner import Owner
from composer_prime.sync.runtime import ThreadRuntime
from tests.patience import PATIENCE_S
from tests.sync.harness import KEYS, OWNER, HandSite, ThreadSite, admitting, make_terms, run_sites

TERMS = make_terms(rounds=40, snapshot_rounds=2, max_stale_rounds=2, keep_log=False, liveness_s=10.0, grace_s=0.0)


def rounds(clock, num_rounds: int, *sites: HandSite) -> None:
    for _ in range(num_rounds):
        version = sites[0].courier.versions()[0]
        for site in sites:
            site.beat()
            site.hand_over(0, torch.randn(site.replicas[0].numel) * 0.1)
        for _ in range(5):
            for site in sites:
                site.tick()
            clock[0] += 0.7
            if all(site.courier.versions()[0] > version for site in sites):
                break
        for site in sites:
            site.tick()
            site.courier.collect(0)


def versions_of(store, what: str) -> set[int]:
    if what == "masters":
        return {keys.parse_master(key)[1] for key in store.list(keys.masters_prefix(0))}
    listed = store.list(keys.rounds_prefix(0))
    if what == "commits":
        return {int(key.split("/")[2]) for key in listed if key.endswith("commit.json")}
    places = [(key, keys.parse_collectable(key)) for key in listed]
    return {place[1] for key, place in places if place and keys.is_payload(key) == (what == "payloads")}


def test_old_payloads_offers_and_snapshots_go_and_every_commit_stays(store, clock):
    a = HandSite(store, TERMS, "a", clock)
    rounds(clock, 13, a)
    assert versions_of(store, "commits") == set(range(13))
    assert versions_of(store, "masters") == {8, 10, 12}, "12 counts once the commit after it vouches for it"
    assert min(versions_of(store, "offers")) == 8 and min(versions_of(store, "payloads")) == 6


def test_what_a_live_or_joining_site_has_pinned_stays(store, clock):
    a, slow = HandSite(store, TERMS, "a", clock), HandSite(store, TERMS, "b", clock)
    for _ in range(12):
        slow.beat()  # lives, but reads nothing
        rounds(clock, 1, a)
    assert min(versions_of(store, "payloads")) == 0 and min(versions_of(store, "offers")) == 0
    slow.courier.follow()
    assert slow.courier.master(0).sha256 == a.courier.master(0).sha256
    clock[0] += 1.0
    for _ in range(3):
        slow.beat()
        rounds(clock, 1, a)
    assert min(versions_of(store, "offers")) > 0, "once it has read them they may go"


def test_a_site_that_was_paused_too_long_goes_on_from_a_newer_snapshot(store, clock):
    a, paused = HandSite(store, TERMS, "a", clock), HandSite(store, TERMS, "b", clock)
    paused.hand_over(0, 5.0)
    paused.runtime.run_tasks()
    clock[0] += 11.0  # no beat: it counts as gone
    a.courier._members.observe()
    clock[0] += 11.0
    rounds(clock, 13, a)
    assert min(versions_of(store, "offers")) > 0
    paused.courier.follow()
    assert paused.courier.master(0).sha256 == a.courier.master(0).sha256
    settled = paused.courier.collect(0)[1]
    assert settled is not None and settled.outcome == "missed"


def test_a_jump_that_could_not_read_all_it_needs_is_made_again(store, clock, monkeypatch):
    a, paused = HandSite(store, TERMS, "a", clock), HandSite(store, TERMS, "b", clock)
    clock[0] += 11.0  # no beat: it counts as gone
    a.courier._members.observe()
    clock[0] += 11.0
    rounds(clock, 13, a)
    sound, unread = replica.read_bytes, [keys.commit(0, max(versions_of(store, "masters")) - 1)]

    def fail_once(at: Store, key: str) -> bytes:
        if key in unread:
            unread.clear()
            raise StoreError("on cue")
        return sound(at, key)

    monkeypatch.setattr(replica, "read_bytes", fail_once)
    with pytest.raises(StoreError, match="on cue"):
        paused.courier.follow()
    assert paused.courier.versions()[0] == paused.replicas[0].version
    paused.courier.follow()
    assert paused.courier.master(0).sha256 == a.courier.master(0).sha256


def test_a_site_that_may_not_merge_parts_does_not_wait_for_those_that_were_collected(store, clock):
    terms = TERMS.model_copy(update={"gather_sites": 1, "slices": 2})
    a, b = (HandSite(store, terms, name, clock, key=KEYS[name], founding=admitting("ab", OWNER)) for name in "ab")
    Owner(store, OWNER).admit("p", KEYS["p"].public, guest=True)
    paused = HandSite(store, terms, "p", clock, key=KEYS["p"])
    for site in (a, b):
        site.roster.refresh()
        site.courier._members.observe()
    clock[0] += 11.0  # no beat: it counts as gone
    rounds(clock, 13, a, b)
    assert min(versions_of(store, "offers")) > 0
    for _ in range(4):
        paused.courier.follow()
        clock[0] += 1.0
    assert paused.courier.master(0).version > 8


def test_whole_sites_finish_with_equal_masters_while_garbage_goes(store):
    terms = make_terms(rounds=20, snapshot_rounds=2, max_stale_rounds=2, keep_log=False, sync_delay=1, liveness_s=1.0)
    sites = [ThreadSite(store, terms, name, data_seed=index) for index, name in enumerate("abc")]
    run_sites(*sites)
    assert len({str(site.summary["masters"]) for site in sites}) == 1
    assert min(versions_of(store, "offers")) > 0
    late = ThreadSite(store, terms, "z")
    run_sites(late)
    assert late.summary["masters"] == sites[0].summary["masters"]


def test_what_takes_long_to_delete_holds_up_no_pass(store, clock):
    a = HandSite(store, TERMS.model_copy(update={"keep_log": True}), "a", clock)
    rounds(clock, 25, a)
    deleting, go_on, runtime = threading.Event(), threading.Event(), ThreadRuntime()

    class Slow(MemoryStore):
        def delete(self, key: str) -> None:
            deleting.set()
            go_on.wait(PATIENCE_S)
            super().delete(key)

    slow, terms = Slow(store.uri.removeprefix("memory://")), a.run.terms.model_copy(update={"keep_log": False})
    known = {"roster": a.roster, "members": Members(slow, runtime, a.roster, 0.0), "runtime": runtime}
    found: list[int] = []
    collecting = threading.Thread(
        target=lambda: found.append(collect_garbage(slow, replace(a.run, terms=terms), 0, **known)), daemon=True
    )
    passing = threading.Thread(target=lambda: [runtime.map(abs, range(20)) for _ in range(100)], daemon=True)
    try:
        collecting.start()
        assert deleting.wait(PATIENCE_S)
        passing.start()
        passing.join(5)
        assert not passing.is_alive()
    finally:
        go_on.set()
        collecting.join(PATIENCE_S)
    assert found[0] > 20 and min(versions_of(store, "offers")) > 10
    runtime.close()
