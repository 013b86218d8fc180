"""How much of a link and of a server one store takes: parts under way, and connections that stay open."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

from composer_prime.store import Store
from composer_prime.store.obstore import ObjectStore, open_bucket
from tests.crowd import Crowd
from tests.patience import PATIENCE_S
from tests.servers.faulty_s3 import FaultyServer


def test_four_parts_of_an_object_are_under_way_at_once_and_no_more(faulty: FaultyServer) -> None:
    crowd = Crowd(4)
    faulty.visit = crowd.visit
    with closing(ObjectStore(replace(open_bucket("s3", "bucket").place, part_bytes=1000))) as store:
        store.put("k", bytes(16_000))
    assert len(faulty.objects["/bucket/k"]) == 16_000
    assert crowd.most == 4


def rush(faulty: FaultyServer, store: Store) -> None:
    """Read with 40 connections at once."""
    faulty.objects["/bucket/k"] = b"bytes"
    crowd = Crowd(40)
    faulty.visit = crowd.visit
    with ThreadPoolExecutor(40) as pool:
        assert list(pool.map(lambda _: store.get("k"), range(40))) == [b"bytes"] * 40
    assert crowd.most == 40


def test_no_more_than_32_connections_stay_open_after_a_rush(faulty: FaultyServer, faulty_store: Store) -> None:
    rush(faulty, faulty_store)
    with faulty.changed:
        assert faulty.changed.wait_for(lambda: faulty.num_connections == 32, timeout=PATIENCE_S), faulty.num_connections
