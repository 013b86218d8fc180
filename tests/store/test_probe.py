"""Races of writers pass on every store that keeps create-if-absent, and name the one that doesn't."""

import secrets
from collections.abc import Callable
from contextlib import closing

import pytest

from composer_prime.errors import StoreUnusable
from composer_prime.store import open_store, probe_store, race_store
from composer_prime.store.obstore import MemoryStore
from tests.store.faulty_store import FaultPlan, FaultyStore
from tests.store.meeting import Meeting

REMEDY = r"use a store that honours If-None-Match \(AWS S3, SeaweedFS, Ceph\), or a folder"


@pytest.mark.parametrize(
    "kind",
    [
        "memory",
        "file",
        pytest.param("moto", marks=pytest.mark.s3),
        pytest.param("seaweed", marks=[pytest.mark.s3, pytest.mark.slow]),
        "gs",
        "az",
    ],
)
def test_sixteen_writers_race_twenty_times_and_nothing_stays(kind: str, store_uri: Callable[[str], str]) -> None:
    with closing(open_store(store_uri(kind))) as store:
        race_store(store)
        assert store.list("") == []


@pytest.mark.s3
def test_rclone_works_as_a_store_but_is_refused_because_every_writer_wins(store_uri: Callable[[str], str]) -> None:
    with closing(open_store(store_uri("rclone"))) as store:
        store.put("a/k", b"0123456789")
        assert (store.get("a/k"), store.list("a/")) == (b"0123456789", ["a/k"])
        with pytest.raises(
            StoreUnusable, match=rf"store {store.uri} .*of 5 races of 8 writers, 5 had 8 winners;.*{REMEDY}"
        ):
            race_store(store, writers=8, races=5)
        with pytest.raises(StoreUnusable, match=f"store {store.uri} .*of two writers of one key, 2 won"):
            probe_store(store)


def test_store_that_checks_then_writes_passes_the_cheap_probe_and_fails_the_race() -> None:
    probe_store(Meeting(secrets.token_hex(8), num_meeting=0))
    with pytest.raises(StoreUnusable, match=rf"of 1 races of 4 writers, 1 had [34] winners;.*{REMEDY}"):
        race_store(Meeting(secrets.token_hex(8), num_meeting=3), writers=4, races=1)


class Ungrateful(MemoryStore):
    """Writes the first bytes, and tells everybody that they lost."""

    def create(self, key: str, data: bytes) -> bool:
        super().create(key, data)
        return False


class Usurped(MemoryStore):
    """Names one winner, and keeps another's bytes."""

    def create(self, key: str, data: bytes) -> bool:
        won = super().create(key, data)
        self.put(key, b"usurper")
        return won


class Void(MemoryStore):
    """Tells everybody that they lost, and keeps nothing."""

    def create(self, key: str, data: bytes) -> bool:
        return False


@pytest.mark.parametrize(
    ("fake", "count"),
    [
        (Ungrateful, "3 had 0 winners; in 3 a loser's bytes stand"),
        (Usurped, "3 had 1 winner; in 3 a loser's bytes stand"),
        (Void, "3 had 0 winners; in 3 a loser's bytes stand"),
    ],
)
def test_race_without_a_winner_whose_bytes_stand_is_refused(fake: type[MemoryStore], count: str) -> None:
    with pytest.raises(StoreUnusable, match=rf"of 3 races of 4 writers, {count};.*{REMEDY}"):
        race_store(fake(secrets.token_hex(8)), writers=4, races=3)


def test_store_that_fails_in_a_race_is_named_with_the_cause() -> None:
    broken = FaultyStore(MemoryStore(secrets.token_hex(8)), FaultPlan(error_before=0.3, seed=1))
    with pytest.raises(StoreUnusable, match=f"store {broken.uri} can't be used: create of probe/.*planned fault"):
        race_store(broken)


def test_lost_answers_that_the_client_sends_again_do_not_make_a_store_look_broken() -> None:
    store = FaultyStore(MemoryStore(secrets.token_hex(8)), FaultPlan(own_retry=0.5))
    race_store(store)
    assert store.list("") == []
