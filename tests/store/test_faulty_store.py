"""Each fault of the faulty store does what its plan says, nothing else, and the same again from the same seed."""

import secrets
from collections.abc import Callable
from dataclasses import replace

import pytest

from composer_prime.errors import KeyMissing, StoreError
from composer_prime.store.obstore import MemoryStore
from tests.store.faulty_store import FaultPlan, FaultyStore, WriteLog


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore(secrets.token_hex(8))


def outcomes(store: FaultyStore, num_operations: int = 60) -> list[str]:
    """What a fixed series of calls shows its caller."""
    seen = []
    for number in range(num_operations):
        key = f"k{number % 7}"
        acts: list[Callable[[], object]] = [
            lambda key=key: store.create(key, key.encode()),
            lambda key=key: store.put(key, b"put"),
            lambda key=key: store.get(key),
            lambda: store.list(""),
            lambda key=key: store.delete(key),
        ]
        try:
            seen.append(repr(acts[number % len(acts)]()))
        except StoreError as error:
            seen.append(type(error).__name__ + str(error).partition(" failed: ")[2])
    return seen


def test_error_before_the_act_leaves_nothing(inner: MemoryStore) -> None:
    store = FaultyStore(inner, FaultPlan(error_before=1))
    acts: list[Callable[[], object]] = [lambda: store.create("k", b""), lambda: store.put("k", b"")]
    for act in acts:
        with pytest.raises(StoreError, match=r"of k in memory://.* planned fault \d of seed 0, before it acted"):
            act()
    assert inner.list("") == []


def test_error_after_the_act_means_that_it_took_place(inner: MemoryStore) -> None:
    store = FaultyStore(inner, FaultPlan(error_after=1))
    with pytest.raises(StoreError, match=r"put of k .*after it acted"):
        store.put("k", b"put")
    with pytest.raises(StoreError, match=r"create of new .*after it acted"):
        store.create("new", b"created")
    assert (inner.get("k"), inner.get("new")) == (b"put", b"created")
    with pytest.raises(StoreError, match=r"delete of k .*after it acted"):
        store.delete("k")
    assert inner.list("") == ["new"]
    assert inner.create("new", b"created"), "whoever tries again finds the own bytes"


def test_torn_write_leaves_all_of_its_bytes_or_none_as_the_seed_has_it(inner: MemoryStore) -> None:
    inner.put("k", b"old")
    store, stood = FaultyStore(inner, FaultPlan(torn=1)), []
    for number in range(40):
        with pytest.raises(StoreError, match=r"put of k .* planned fault \d+ of seed 0, midway: try again"):
            store.put("k", b"new %d" % number)
        stood.append(inner.get("k"))
    landed = [data == b"new %d" % number for number, data in enumerate(stood)]
    assert 10 < sum(landed) < 30
    before = [b"old", *stood]
    assert all(stood[number] == before[number] for number in range(40) if not landed[number])
    for key in (f"k{number}" for number in range(40)):
        with pytest.raises(StoreError, match=f"create of {key} .*midway"):
            store.create(key, b"created")
    created = [key for key in inner.list("") if key != "k"]
    assert 10 < len(created) < 30 and {inner.get(key) for key in created} == {b"created"}


def test_torn_read_is_a_failure_and_never_short_bytes(inner: MemoryStore) -> None:
    inner.put("k", b"0123456789")
    store = FaultyStore(inner, FaultPlan(torn=1))
    for read in (lambda: store.get("k"), lambda: store.get_range("k", 2, 5), lambda: store.list("")):
        for _ in range(5):
            with pytest.raises(StoreError, match="midway") as raised:
                read()
            assert not isinstance(raised.value, KeyMissing)


def test_create_sent_twice_by_its_client_has_won_because_the_same_bytes_stand(inner: MemoryStore) -> None:
    store = FaultyStore(inner, FaultPlan(own_retry=1))
    assert store.create("k", b"mine") is True
    assert store.create("k", b"other") is False


def test_stale_list_misses_what_was_written_within_the_last_operations(inner: MemoryStore) -> None:
    inner.put("old", b"")
    store = FaultyStore(inner, FaultPlan(stale_list=1, stale_operations=2))
    store.put("new", b"")
    store.put("old", b"again")
    assert store.list("") == ["old"], "a key that was there before stays listed when it is written over"
    assert store.get("new") == b"", "reads are consistent"
    assert store.list("") == ["new", "old"], "late, not lost"


def test_sites_that_share_a_write_log_list_each_others_writes_late(inner: MemoryStore) -> None:
    writes = WriteLog()
    plan = FaultPlan(stale_list=1, stale_operations=2)
    one, other = FaultyStore(inner, plan, writes=writes), FaultyStore(inner, plan, writes=writes)
    one.put("k", b"")
    assert other.list("") == []
    assert [other.list(""), other.list("")] == [[], ["k"]]


PLENTY = FaultPlan(error_before=0.2, error_after=0.2, torn=0.2, own_retry=0.3, stale_list=0.5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_same_seed_same_faults(seed: int) -> None:
    seen = []
    for _ in range(2):
        store = FaultyStore(MemoryStore(secrets.token_hex(8)), replace(PLENTY, seed=seed))
        seen.append([outcome.replace(store.uri, "") for outcome in outcomes(store)])
    assert seen[0] == seen[1]
    other = FaultyStore(MemoryStore(secrets.token_hex(8)), replace(PLENTY, seed=seed + 10))
    assert seen[0] != outcomes(other)
