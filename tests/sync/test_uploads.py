"""Captures whose upload outlasts what became of them, and rounds that wait for what somebody else uploaded."""

import pytest
import torch

from composer_prime.errors import StoreError
from composer_prime.store import keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Commit
from tests.sync.harness import HandSite, make_terms

TERMS = make_terms(fragments=1, rounds=20, liveness_s=1000.0)


class Refusing(MemoryStore):
    """Takes the object `lost` no more."""

    lost, num_refused = "", 0

    def put(self, key: str, data: bytes | memoryview) -> None:
        if key == self.lost:
            self.num_refused += 1
            raise StoreError(f"put of {key} refused")
        super().put(key, data)


def older_process_moves(store, clock) -> tuple[HandSite, HandSite]:
    """Two processes of one name; the newer one's capture isn't uploaded yet when the older one's offer is merged."""
    older = HandSite(store, TERMS, "a", clock)
    older.hand_over(0, 1.0)
    older.runtime.run_tasks()
    older.courier._bring(0)
    newer = HandSite(store, TERMS, "a", clock)
    newer.hand_over(0, 2.0)  # some of it the same movement
    older.courier._closer.serve(older.replicas[0])
    assert store.list(keys.commit(0, 0))
    return older, newer


def test_a_capture_that_an_older_process_has_overtaken_is_offered_into_no_later_round(store, clock):
    _, newer = older_process_moves(store, clock)
    newer.courier.follow()
    newer.tick(times=3)
    assert newer.courier.versions() == (1,) and store.list(keys.offers_prefix(0, 1)) == []
    _, settled = newer.courier.collect(0)
    assert settled is not None and settled.outcome == "overtaken"


def test_nothing_is_kept_of_a_capture_that_was_settled_before_it_was_coded(store, clock):
    _, newer = older_process_moves(store, clock)
    newer.courier.follow()
    newer.courier.collect(0)
    newer.runtime.run_tasks()
    assert newer.replicas[0].merger._kept == {}


@pytest.mark.parametrize("damage", ["missing", "other bytes"])
def test_who_joins_while_a_round_lacks_a_payload_waits_for_it_as_the_others_do(store, clock, damage):
    a = HandSite(store, TERMS, "a", clock)
    a.hand_over(0, 1.0)
    a.tick(times=2)
    payload = read_record(store, Commit, keys.commit(0, 0)).taken[0].offer.payload
    assert payload is not None
    data = store.get(payload)
    store.delete(payload)
    if damage == "other bytes":
        store.put(payload, bytes(len(data)))
    joiner = HandSite(store, TERMS, "b", clock)
    assert joiner.courier.versions() == (0,)
    store.put(payload, data)
    joiner.tick()
    assert joiner.courier.versions() == (1,)
    assert torch.equal(joiner.courier.master(0).weights, a.courier.master(0).weights)


@pytest.mark.parametrize("codec", ["fp32", "int8", "topk"])
@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_a_site_puts_its_own_payload_again_once_a_commit_took_it_and_the_bucket_has_lost_it(
    store, clock, damage, codec
):
    a = HandSite(store, TERMS.model_copy(update={"codec": codec}), "a", clock)
    a.hand_over(0, torch.linspace(-1, 1, a.run.fragments[0].numel))
    a.runtime.run_tasks()
    (payload,) = (key for key in store.list("rounds/") if keys.is_payload(key))
    data = store.get(payload)
    store.delete(payload)
    if damage == "cut short":
        store.put(payload, data[:-1])
    a.tick(times=2)
    assert store.list(keys.commit(0, 0)) and store.get(payload) == data
    joiner = HandSite(store, a.run.terms, "b", clock)
    assert joiner.courier.versions() == a.courier.versions() == (1,)
    assert torch.equal(joiner.courier.master(0).weights, a.courier.master(0).weights)


def test_a_bucket_that_does_not_take_the_payload_again_holds_its_site_up_no_more(clock):
    store = Refusing("test_uploads_refusing")
    a = HandSite(store, TERMS, "a", clock)
    a.hand_over(0, 1.0)
    a.runtime.run_tasks()
    (store.lost,) = (key for key in store.list("rounds/") if keys.is_payload(key))
    store.delete(store.lost)
    with pytest.raises(StoreError, match="refused"):
        a.tick(times=2)
    a.tick()
    assert a.courier.versions() == (1,) and store.num_refused == 1
