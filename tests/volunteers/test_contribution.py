"""What a site gave, from the bucket alone: the same tokens that the site itself counted."""

import pytest

from composer_prime.errors import BadInput
from composer_prime.store import keys, open_store
from composer_prime.sync.records import Beat
from composer_prime.volunteers.contribution import contribution, lines
from tests.sync.harness import ThreadSite, make_terms, run_sites


def test_tokens_rounds_bytes_and_hours_are_the_sites_own(request: pytest.FixtureRequest) -> None:
    store = open_store(f"memory://{request.node.name}")
    sites = [ThreadSite(store, make_terms(), name, data_seed=place) for place, name in enumerate("ab")]
    run_sites(*sites)
    found = contribution(store, "a")
    ledgers = sites[0].summary["tokens"]
    assert found.trained_tokens == max(ledger["trained"] for ledger in ledgers) > 0
    assert found.merged_tokens == round(sum(ledger["merged"] for ledger in ledgers) / 2) > 0
    other = contribution(store, "b")
    assert found.share + other.share == pytest.approx(1.0)
    assert found.rounds_taken > 0 and found.starts == 1 and found.state == "done"
    assert 0 < found.bytes_up <= sites[0].summary["bytes_up"]
    assert 0 < found.bytes_down <= sites[0].summary["bytes_down"]
    beat = Beat.from_bytes(store.get(keys.beat("a", 0)), "beat")
    assert found.hours == pytest.approx(beat.counter * 60.0 / 5 / 3600)
    assert any("merged" in line and "dropped" in line for line in lines(found))


def test_every_process_of_a_site_counts(request: pytest.FixtureRequest) -> None:
    store = open_store(f"memory://{request.node.name}")
    first = ThreadSite(store, make_terms(), "a", stop_after=5)
    run_sites(first)
    once = contribution(store, "a")
    run_sites(ThreadSite(store, make_terms(), "a", state=first.saved))
    twice = contribution(store, "a")
    assert (once.starts, twice.starts) == (1, 2)
    assert twice.bytes_up > once.bytes_up > 0 and twice.hours > once.hours > 0


def test_a_site_that_never_came_is_said_so(request: pytest.FixtureRequest) -> None:
    store = open_store(f"memory://{request.node.name}")
    run_sites(ThreadSite(store, make_terms(), "a"))
    with pytest.raises(BadInput, match=r"site bob never came to run run; a did"):
        contribution(store, "bob")
