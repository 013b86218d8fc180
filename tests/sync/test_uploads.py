"""Payloads and snapshots that are late, lost or damaged: rounds wait for them, joiners go past them or are told."""

from collections.abc import Callable

import pytest
import torch

from composer_prime.errors import KeyMissing, StoreError
from composer_prime.outer.fragments import trainable
from composer_prime.store import Store, keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.archive import AGAIN_S
from composer_prime.sync.ledger import FragmentLedger
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.replica import Replica
from composer_prime.sync.returning import FragmentStand, Returning
from tests.sync.harness import HandSite, commit_of, empty_commit, make_net, make_terms

# --- captures whose upload outlasts what became of them --------------------------------------------------------------


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
    older.offer(0, 1.0)
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
    payload = commit_of(store).taken[0].offer.payload
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


# --- rounds that the others have passed ------------------------------------------------------------------------------


COLLECTED = make_terms(fragments=1, rounds=30, snapshot_rounds=4, liveness_s=1000.0, keep_log=False)
LOGGED = COLLECTED.model_copy(update={"keep_log": True})

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
    return str(commit_of(store, version).taken[0].offer.payload)


def replica_from_the_first_master(site: HandSite) -> Replica:
    start = Replica(site.store, site.run, 0, runtime=site.runtime, roster=site.roster, site="z", at_most=0).master
    return Replica(site.store, site.run, 0, runtime=site.runtime, roster=site.roster, site="z", start=start)


@pytest.mark.parametrize("terms", [COLLECTED, LOGGED], ids=["collected", "kept"])
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
    a = HandSite(store, COLLECTED, "a", clock)
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
        site.offer(0, 2.0)
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
    a = HandSite(store, COLLECTED, "a", clock)
    play(a, 9)
    store.hidden = store.list(keys.masters_prefix(0))[-1]
    assert keys.parse_master(store.hidden)[1] == 8
    b = HandSite(store, COLLECTED, "b", clock)
    assert b.courier.versions() == a.courier.versions() == (9,)
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256
    b.pulse.beat("done", b.courier.versions(), (9,), 0, 0)
    play(a, 8)
    a.beat()
    play(a, 4)
    left = [keys.parse_master(key)[1] for key in store.list(keys.masters_prefix(0))]
    assert left == [12, 16, 20]


# --- a snapshot whose upload failed is tried again -------------------------------------------------------------------


class NoSnapshots(MemoryStore):
    """Takes no master while it is full."""

    is_full = False

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.is_full and keys.is_master(key):
            raise StoreError(f"{key} can't be put: free some space")
        super().put(key, data)


def versions_stored(store: MemoryStore) -> list[int]:
    return sorted(keys.parse_master(key)[1] for key in store.list(keys.masters_prefix(0)))


def one_round(site: HandSite) -> None:
    site.hand_over(0, 1.0)
    site.tick(times=3)
    site.runtime.run_tasks()
    site.courier.collect(0)


def test_a_snapshot_whose_upload_failed_is_tried_again_before_the_next_is_due() -> None:
    store, clock = NoSnapshots("test_archive"), [0.0]
    site = HandSite(store, make_terms(fragments=1, snapshot_rounds=8, rounds=40), "a", clock)
    for _ in range(7):
        one_round(site)
    store.is_full = True
    one_round(site)
    assert versions_stored(store) == [0]
    store.is_full = False
    one_round(site)
    assert versions_stored(store) == [0], "not before some time has passed"
    clock[0] += AGAIN_S
    site.tick(times=2)
    site.tick()
    assert versions_stored(store) == [0, 8]


def test_of_a_failed_snapshot_nothing_is_left_to_do_once_a_newer_one_stands() -> None:
    store, clock = NoSnapshots("test_archive_newer"), [0.0]
    site = HandSite(store, make_terms(fragments=1, snapshot_rounds=2, rounds=40), "a", clock)
    store.is_full = True
    for _ in range(2):
        one_round(site)
    store.is_full = False
    for _ in range(2):
        one_round(site)
    clock[0] += AGAIN_S
    site.tick(times=2)
    site.tick()
    assert versions_stored(store) == [0, 4]


def test_a_snapshot_that_is_due_while_another_is_stored_is_stored_afterwards_though_rounds_went_on() -> None:
    store, clock = MemoryStore("test_archive_waiting"), [0.0]
    site = HandSite(store, make_terms(fragments=2, snapshot_rounds=4, rounds=40), "a", clock)
    for _ in range(6):  # a slow link: what stores the first snapshot doesn't come to it
        for fragment in (0, 1):
            site.hand_over(fragment, 1.0)
            stored = site.courier._archive.task
            next(task for task in site.runtime.tasks if task.is_alive() and task is not stored).run()
            for _ in range(3):
                site.courier.follow()
                site.courier.tick()
            site.courier.collect(fragment)
    assert site.courier.versions() == (6, 6) and store.list("masters/0001/00000004") == []
    site.tick(times=2)
    site.tick()
    assert [len(store.list(f"masters/000{fragment}/00000004")) for fragment in (0, 1)] == [1, 1]
