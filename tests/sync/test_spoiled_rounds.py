"""A round whose payload is gone or damaged once the others have passed it, and snapshots that nobody can read: who
comes in later goes past them, or is told; nobody stands still in silence."""

from collections.abc import Callable

import pytest
import torch

from composer_prime.errors import KeyMissing, StoreError
from composer_prime.outer.fragments import trainable
from composer_prime.store import Store, keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.ledger import FragmentLedger
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Commit
from composer_prime.sync.replica import Replica
from composer_prime.sync.returning import FragmentStand, Returning
from tests.sync.harness import HandSite, empty_commit, make_net, make_terms

TERMS = make_terms(fragments=1, rounds=30, snapshot_rounds=4, liveness_s=1000.0, keep_log=False)
LOGGED = TERMS.model_copy(update={"keep_log": True})

SPOIL: dict[str, Callable[[Store, str], None]] = {
    "missing": lambda store, payload: store.delete(payload),
    "other bytes": lambda store, payload: store.put(payload, bytes(len(store.get(payload)))),
}


def play(site: HandSite, rounds: int) -> None:
    """That many rounds of a site alone, and their snapshots."""
    for _ in range(rounds):
        site.courier.collect(0)
        site.hand_over(0, 1.0 + site.replicas[0].version)
        site.tick(times=3)
        site.runtime.run_tasks()


def payload_of(store: Store, version: int) -> str:
    return str(read_record(store, Commit, keys.commit(0, version)).taken[0].offer.payload)


def replica_from_the_first_master(site: HandSite) -> Replica:
    start = Replica(site.store, site.run, 0, runtime=site.runtime, roster=site.roster, site="z", at_most=0).master
    return Replica(site.store, site.run, 0, runtime=site.runtime, roster=site.roster, site="z", start=start)


@pytest.mark.parametrize("terms", [TERMS, LOGGED], ids=["collected", "kept"])
@pytest.mark.parametrize("damage", SPOIL)
def test_who_joins_behind_a_round_that_the_others_have_passed_waits_and_comes_in_by_the_next_snapshot(
    store, clock, damage, terms
):
    a = HandSite(store, terms, "a", clock)
    play(a, 7)
    SPOIL[damage](store, payload_of(store, 5))
    waiting = HandSite(store, terms, "b", clock)
    with pytest.raises(StoreError, match="round 5 of fragment 0 can't be skipped"):
        waiting.courier.follow()
    waiting.pulse.beat("leaving", (5,), (5,), 0, 0)
    play(a, 2)  # the log vouches for the snapshot of version 8 with the commit of the round after it
    b = HandSite(store, terms, "b", clock)
    assert b.courier.versions() == a.courier.versions() == (9,)
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256


@pytest.mark.parametrize("damage", SPOIL)
def test_who_begins_at_the_models_own_weights_goes_past_such_a_round_by_a_snapshot(store, clock, damage):
    """With the log kept; it would choose to begin there again, however often it is started."""
    a = HandSite(store, LOGGED, "a", clock)
    play(a, 6)
    SPOIL[damage](store, payload_of(store, 2))
    b = HandSite(store, LOGGED, "b", clock)
    b.courier._replicas[0] = b.replicas[0] = replica_from_the_first_master(b)
    b.courier.catch_up()
    assert b.courier.versions() == (6,) and b.courier.master(0).sha256 == a.courier.master(0).sha256


@pytest.mark.parametrize("damage", SPOIL)
def test_a_site_that_fell_behind_goes_past_such_a_round_where_the_log_may_be_collected(store, clock, damage):
    a = HandSite(store, TERMS, "a", clock)
    b = replica_from_the_first_master(a)
    play(a, 3)
    SPOIL[damage](store, payload_of(store, 2))
    for _ in range(2):
        assert b.advance()
    with pytest.raises(StoreError):
        b.advance()
    play(a, 13)
    assert b.advance()
    assert b.version >= 8
    while b.advance():
        pass
    assert b.master.sha256 == a.replicas[0].master.sha256


def test_who_comes_back_stands_on_nothing_older_than_its_checkpoint(store, clock):
    """Else what its checkpoint calls merged is merged again by the log, as another process's, and its work dropped."""
    terms = LOGGED.model_copy(update={"momentum": 0.9})
    a = HandSite(store, terms, "a", clock)
    play(a, 6)
    payload = payload_of(store, 5)
    data = store.get(payload)
    net = make_net()
    params = LocalParameters(dict(trainable(net.named_parameters())))
    fragment, master = a.run.fragments[0], a.replicas[0].master
    params.write(fragment, master.weights - 0.25)
    ledger = FragmentLedger(trained=70, merged=60, pending_steps=1)
    saved = FragmentStand(6, master.weights.clone(), ledger=ledger)
    store.delete(payload)
    back = HandSite(store, terms, "a", clock)
    assert back.courier.versions() == (5,)
    places = {"runtime": back.runtime, "roster": back.roster, "terms": terms, "journal": None, "site": "a"}
    returning = Returning(store, params=params, **places)
    with pytest.raises(StoreError, match="checkpoint stands on version 6, and the log can be read up to 5 only now"):
        returning.stand(back.replicas[0], saved)
    assert torch.equal(params.read(fragment), master.weights - 0.25), "nothing is lost"
    store.put(payload, data)
    back.courier.follow()
    stand, errand = returning.stand(back.replicas[0], saved)
    assert (stand.version, stand.ledger.carried, errand) == (6, 10, None)
    assert torch.allclose(params.read(fragment), master.weights - 0.25)


def test_an_empty_commit_on_an_invented_master_is_void_though_a_round_before_can_not_be_replayed(store, clock):
    """Sites that hold the log's master, as the others' offers say, needn't make it anew to know that."""
    terms = LOGGED.model_copy(update={"grace_s": 1.0})
    a, b, e = (HandSite(store, terms, name, clock) for name in "abe")
    for _ in range(5):
        before = a.courier.versions()
        for number, site in enumerate((a, b, e)):
            site.beat()
            site.courier.collect(0)
            site.hand_over(0, 1.0 + number)
        while any(site.courier.versions() == before for site in (a, b, e)):
            for site in (a, b, e):
                site.tick()
            clock[0] += 0.5
    SPOIL["other bytes"](store, payload_of(store, 4))
    for site in (a, b):
        site.courier.collect(0)
        site.hand_over(0, 2.0)
        site.runtime.run_tasks()
        site.courier._bring(0)
    false = empty_commit(version=5, base_sha="ab" * 32, previous=e.replicas[0].previous, committer="e")
    assert store.create(keys.commit(0, 5), false.to_bytes())
    for site in (a, b):
        site.tick()
    assert [site.courier.versions() for site in (a, b)] == [(6,), (6,)]
    assert [site.replicas[0].history.voids for site in (a, b)] == [(5,), (5,)]
    assert a.courier.master(0).sha256 == b.courier.master(0).sha256


class Hiding(MemoryStore):
    """Lists a key whose bytes nobody can read."""

    hidden = ""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if key == self.hidden:
            raise KeyMissing(f"no object that anybody can read at {key}")
        return super().get_range(key, start, length)


def test_a_snapshot_that_its_writer_hid_stops_no_joiner_and_no_garbage_collection(clock) -> None:
    store = Hiding("test_spoiled_rounds_hidden")
    a = HandSite(store, TERMS, "a", clock)
    play(a, 9)
    store.hidden = store.list(keys.masters_prefix(0))[-1]
    assert keys.parse_master(store.hidden)[1] == 8
    b = HandSite(store, TERMS, "b", clock)
    assert b.courier.versions() == a.courier.versions() == (9,)
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256
    b.pulse.beat("done", b.courier.versions(), (9,), 0, 0)
    play(a, 8)
    a.beat()
    play(a, 4)
    left = [keys.parse_master(key)[1] for key in store.list(keys.masters_prefix(0))]
    assert left == [12, 16, 20]
