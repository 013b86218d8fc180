"""The probe and the races of writers name a store that doesn't keep create-if-absent, or is broken."""

import secrets
from collections.abc import Callable
from contextlib import closing

import pytest

from composer_prime.errors import StoreError, StoreUnusable
from composer_prime.store import open_store, probe_store, race_store
from composer_prime.store.obstore import MemoryStore
from tests.store.faulty_store import FaultPlan, FaultyStore
from tests.store.meeting import Meeting

REMEDY = r"use a store that honours If-None-Match \(AWS S3, SeaweedFS, Ceph\), or a folder"


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


@pytest.mark.parametrize(
    ("fake", "count"),
    [
        (Ungrateful, "3 had 0 winners; in 3 a loser's bytes stand"),
        (Usurped, "3 had 1 winner; in 3 a loser's bytes stand"),
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


class TwoWinners(MemoryStore):
    """Ignores the condition, as some S3 servers do."""

    def create(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


class Flatterer(MemoryStore):
    """Tells everyone that they won, though the first bytes stay."""

    def create(self, key: str, data: bytes) -> bool:
        return super().create(key, data) or True


class SilentOverwriter(MemoryStore):
    """Says that the second writer lost, and keeps its bytes all the same."""

    def create(self, key: str, data: bytes) -> bool:
        first = key not in self.list("")
        self.put(key, data)
        return first


class LateLister(MemoryStore):
    """Does not list what was just written."""

    def list(self, prefix: str) -> list[str]:
        return []


class Broken(MemoryStore):
    """Can't be written."""

    def create(self, key: str, data: bytes) -> bool:
        raise StoreError("the disk is on fire")


@pytest.mark.parametrize(
    ("fake", "cause"),
    [
        (TwoWinners, "does not keep create-if-absent .*2 won.*second one's bytes stand"),
        (Flatterer, "does not keep create-if-absent .*2 won.*first one's bytes stand"),
        (SilentOverwriter, "does not keep create-if-absent .*1 won.*second one's bytes stand"),
        (LateLister, "does not list what was just written"),
        (Broken, "can't be used: the disk is on fire"),
    ],
)
def test_probe_refuses_a_broken_store_and_names_it(fake: type[MemoryStore], cause: str) -> None:
    with pytest.raises(StoreUnusable, match=f"memory://broken {cause}"):
        probe_store(fake("broken"))
