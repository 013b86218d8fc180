"""One run after another in one place: which is which, how one goes, and what a deletion that was cut short leaves."""

import pytest

from composer_prime.errors import BadInput, RunGone
from composer_prime.store import Store, keys
from composer_prime.sync.deleting import delete_run, refuse_live
from composer_prime.sync.founding import FoundingRecord, announce
from tests.sync.harness import HandSite, ThreadSite, make_terms, run_sites


def empty(store: Store) -> None:
    for key in store.list(""):
        store.delete(key)


def test_equal_recipes_make_two_runs_and_a_site_of_the_first_offers_nothing_to_the_second(store):
    old = HandSite(store, make_terms(), "a", [0.0])
    empty(store)
    new = HandSite(store, make_terms(), "a", [0.0])
    assert new.run.sha256 != old.run.sha256
    assert new.run.manifest.masters == old.run.manifest.masters
    old.hand_over(0, 1.0)
    with pytest.raises(RunGone, match="holds another run now"):
        old.tick()
    assert not [key for key in store.list("") if key.startswith(keys.rounds_prefix(0)) and not keys.is_payload(key)]
    new.hand_over(0, 2.0)
    new.tick(2)
    assert new.replicas[0].version == 1


def test_a_site_whose_run_was_replaced_stops_at_once(store):
    old = ThreadSite(store, make_terms(liveness_s=2.0), "a")

    def replace() -> None:
        empty(store)
        HandSite(store, make_terms(liveness_s=2.0), "b", [0.0])

    old.after_join = replace
    with pytest.raises(RunGone, match="holds another run now"):
        run_sites(old)
    assert not [key for key in store.list("") if keys.is_offer(key)]


def test_a_deletion_that_was_cut_short_is_finished_before_another_run_begins(store, monkeypatch):
    run_sites(ThreadSite(store, make_terms(), "a"))
    deleted, delete = [], type(store).delete

    def cut_short(self: Store, key: str) -> None:
        if len(deleted) == 5:
            raise KeyboardInterrupt
        deleted.append(key)
        delete(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "delete", cut_short)
        with pytest.raises(KeyboardInterrupt):
            delete_run(store, refuse_live(store))
    assert deleted[0] == keys.manifest() and len(store.list("")) > 5
    for begin in (
        lambda: HandSite(store, make_terms(), "b", [0.0]),
        lambda: announce(store, FoundingRecord(run="run", terms=make_terms())),
    ):
        with pytest.raises(BadInput, match=r"whose deletion was cut short.*composer-prime delete"):
            begin()
    delete_run(store, refuse_live(store))
    assert store.list("") == []
    HandSite(store, make_terms(), "b", [0.0])


def test_a_run_that_woke_since_it_was_looked_at_stays(store):
    site = HandSite(store, make_terms(liveness_s=0.1), "a", [0.0])
    looked = refuse_live(store)
    site.beat()
    before = store.list("")
    with pytest.raises(BadInput, match="site a still runs"):
        delete_run(store, looked)
    assert store.list("") == before
