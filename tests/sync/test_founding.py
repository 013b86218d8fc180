"""A run begins, and goes: what is announced is what its first site makes, and one run after another is told apart."""

import secrets
from pathlib import Path

import pytest

from composer_prime.config import SiteSettings, settle_site
from composer_prime.errors import BadInput, CorruptObject, RunGone, StoreUnusable
from composer_prime.store import Store, keys
from composer_prime.sync import site_clock
from composer_prime.sync.deleting import delete_run, refuse_live
from composer_prime.sync.founding import FoundingRecord, announce, find_founding
from composer_prime.sync.site_clock import OuterLoop
from tests.config.recipes import recipe
from tests.store.meeting import Meeting
from tests.sync.harness import HandSite, ThreadSite, make_net, make_terms, run_sites

# --- announced before its model is known -----------------------------------------------------------------------------


RECORD = FoundingRecord(run="run", terms=make_terms(), keys={})


def test_what_was_announced_is_found_and_may_be_announced_again(store):
    assert find_founding(store) is None
    announce(store, RECORD)
    announce(store, RECORD)
    assert find_founding(store) == RECORD


def test_another_run_is_not_announced_where_one_was(store):
    announce(store, RECORD)
    with pytest.raises(BadInput, match=r"already to hold another run \(outer\.rounds: run 3, recipe 4\)"):
        announce(store, RECORD.model_copy(update={"terms": make_terms(rounds=4)}))
    assert find_founding(store) == RECORD


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"{}"], ids=["empty", "garbage", "no fields"])
@pytest.mark.parametrize("act", [find_founding, lambda store: announce(store, RECORD)], ids=["found", "announced"])
def test_a_damaged_announcement_is_no_absent_one_and_says_what_to_do(store, damage, act):
    """Read as none, it would leave terms and keys to whoever writes the manifest."""
    announce(store, RECORD)
    store.put(keys.founding(), damage)
    with pytest.raises(CorruptObject, match=r"^founding\.json .*Restore it from a backup; or delete it") as raised:
        act(store)
    assert "\n" not in str(raised.value)
    store.delete(keys.founding())
    announce(store, RECORD)
    assert find_founding(store) == RECORD


# --- whoever creates a run races its store first ---------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    """What sites open: a store that only writers who race find out."""
    store = Meeting(secrets.token_hex(8), num_meeting=2)
    monkeypatch.setattr(site_clock, "open_store", lambda uri, key_file: store)
    return store


def settle(folder: Path, **outer: object) -> SiteSettings:
    asked = recipe(output_dir=str(folder), outer={"inner_steps": 4, "fragments": 2, **outer})
    return settle_site(asked, "a", inference_port=8000, model_dir=folder / "model", resume=False)


def test_a_run_is_not_created_in_a_store_that_lets_two_of_racing_writers_win(bucket: Meeting, tmp_path: Path) -> None:
    outer = OuterLoop.from_settings(settle(tmp_path))
    with pytest.raises(StoreUnusable, match=r"of 20 races of 16 writers, .*had [23] winners.*: use a store that"):
        outer.join(make_net().named_parameters())
    assert bucket.list("") == []


# --- one run after another in one place ------------------------------------------------------------------------------


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
