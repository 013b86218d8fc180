"""Transfers: one that is cut is tried again, and gives an object whole or an error; how many there are at once."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

from composer_prime.errors import KeyMissing, StoreError, StoreUnusable
from composer_prime.store import Store, remote
from composer_prime.store.obstore import READ_BYTES, ObjectStore, open_bucket
from tests.crowd import Crowd
from tests.patience import PATIENCE_S
from tests.servers.faulty_s3 import FaultyServer

ALWAYS = 10**6

CUT_SIZES = [1, 6, 3 * READ_BYTES + 6, 4 * READ_BYTES]
"""Of objects that are cut in half: before the first byte, in the midst of a read of the body, and between two reads."""


def some_bytes(num_bytes: int) -> bytes:
    return random.Random(num_bytes).randbytes(num_bytes)


@pytest.mark.parametrize("num_bytes", CUT_SIZES)
def test_a_read_that_is_cut_is_tried_again_until_all_bytes_are_there(
    num_bytes: int, faulty: FaultyServer, faulty_store: Store
) -> None:
    data = some_bytes(num_bytes)
    faulty.objects["/bucket/k"] = data
    faulty.torn_gets = 2
    assert faulty_store.get("k") == data
    assert faulty.gets == 3
    faulty.torn_gets = 1
    assert faulty_store.get_range("k", num_bytes // 3, num_bytes) == data[num_bytes // 3 :]
    assert faulty.gets == 5


@pytest.mark.parametrize("num_bytes", CUT_SIZES)
def test_a_read_that_is_always_cut_is_a_store_error_and_never_short_bytes(
    num_bytes: int, faulty: FaultyServer, faulty_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.3)
    faulty.objects["/bucket/k"] = some_bytes(num_bytes)
    faulty.torn_gets = ALWAYS
    for read in (lambda: faulty_store.get("k"), lambda: faulty_store.get_range("k", num_bytes // 3, num_bytes)):
        with pytest.raises(StoreError, match=r"get of k in s3://bucket failed: no sound answer .*: check") as raised:
            read()
        assert not isinstance(raised.value, KeyMissing | StoreUnusable)
    assert faulty.gets > 3, "both are tried again"


@pytest.mark.parametrize("num_bytes", [100, 2**19])
@pytest.mark.parametrize("act", ["put", "create"])
def test_a_write_that_is_reset_midway_is_sent_again_and_the_object_is_whole(
    act: str, num_bytes: int, faulty: FaultyServer, faulty_store: Store
) -> None:
    data = some_bytes(num_bytes)
    faulty.torn_puts = 2
    assert getattr(faulty_store, act)("k", data) in (None, True)
    assert faulty.objects == {"/bucket/k": data}
    assert faulty.puts == 3


def test_a_write_that_is_always_reset_is_a_store_error_and_leaves_what_stood(
    faulty: FaultyServer, faulty_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty_store.put("k", b"old")
    monkeypatch.setattr(remote, "RETRY_S", 0.3)
    faulty.torn_puts = ALWAYS
    with pytest.raises(StoreError, match=r"put of k in s3://bucket failed: no sound answer from .*: check"):
        faulty_store.put("k", some_bytes(2**19))
    assert faulty.objects == {"/bucket/k": b"old"}


def test_a_put_in_parts_of_which_one_is_reset_is_whole_in_the_end_and_leaves_no_parts(faulty: FaultyServer) -> None:
    data = some_bytes(4500)
    with closing(ObjectStore(replace(open_bucket("s3", "bucket").place, part_bytes=1000))) as store:
        store.list("")
        faulty.torn_puts = 1
        store.put("k", data)
    assert faulty.objects == {"/bucket/k": data} and faulty.uploads == {}


def test_four_parts_of_an_object_are_under_way_at_once_and_no_more(faulty: FaultyServer) -> None:
    crowd = Crowd(4)
    faulty.visit = crowd.visit
    with closing(ObjectStore(replace(open_bucket("s3", "bucket").place, part_bytes=1000))) as store:
        store.put("k", bytes(16_000))
    assert len(faulty.objects["/bucket/k"]) == 16_000
    assert crowd.most == 4


def test_no_more_than_32_connections_stay_open_after_a_rush(faulty: FaultyServer, faulty_store: Store) -> None:
    faulty.objects["/bucket/k"] = b"bytes"
    crowd = Crowd(40)
    faulty.visit = crowd.visit
    with ThreadPoolExecutor(40) as pool:
        assert list(pool.map(lambda _: faulty_store.get("k"), range(40))) == [b"bytes"] * 40
    assert crowd.most == 40
    with faulty.changed:
        assert faulty.changed.wait_for(lambda: faulty.num_connections == 32, timeout=PATIENCE_S), faulty.num_connections
