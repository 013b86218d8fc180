"""The same outer loop over every kind of bucket: whole sites on threads, real servers behind them."""

from collections.abc import Callable

import pytest

from composer_prime.store import keys, open_store
from tests.servers.fixtures import gs, store_uri
from tests.sync.harness import ThreadSite, make_terms, run_sites

__all__ = ["gs", "store_uri"]

KINDS = ["memory", "file", "gs", *(pytest.param(kind, marks=pytest.mark.s3) for kind in ("moto", "seaweed", "hf"))]


@pytest.mark.parametrize("kind", KINDS)
def test_two_sites_end_with_equal_masters_over_any_store(kind: str, store_uri: Callable[[str], str]) -> None:
    uri = store_uri(kind)
    terms = make_terms(rounds=2, sync_delay=1, codec="int8", momentum=0.5)
    sites = [ThreadSite(open_store(uri), terms, name, seed=index, data_seed=index) for index, name in enumerate("ab")]
    run_sites(*sites)
    first, second = (site.summary["masters"] for site in sites)
    assert first == second and [master["version"] for master in first] == [3, 3]
    store = open_store(uri)
    stored = {keys.parse_master(key)[:2] for f in (0, 1) for key in store.list(keys.masters_prefix(f))}
    assert {(0, 3), (1, 3)} <= stored
    assert all(site.summary["bytes_up"] > 0 and site.summary["bytes_down"] > 0 for site in sites)
    store.close()
