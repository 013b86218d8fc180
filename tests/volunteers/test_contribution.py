"""What a site gave, from the bucket alone: the same tokens that the site itself counted."""

import pytest

from composer_prime.errors import BadInput
from composer_prime.store import keys, open_store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.records import Beat
from composer_prime.volunteers.contribution import contribution, lines
from composer_prime.watch.status import look
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


WRONG_LINES = [
    b'{"event": "round", "site": "a", "incarnation": 0, "bytes_up": "x", "bytes_down": 1}',
    b'{"event": "x", "site": "a", "incarnation": [0], "bytes_up": 1, "bytes_down": 1}',
    b'{"event": "x", "site": "a", "incarnation": 0, "bytes_up": 1' + b"0" * 400 + b', "bytes_down": 1}',
    b'{"event": "x", "site": "a", "incarnation": 0, "bytes_up": 1e999, "bytes_down": -5}',
    b'{"event": "dropped", "site": "a", "fragment": 0, "version": 0, "tokens": 1' + b"0" * 400 + b"}",
    b'{"event": "dropped", "site": "a", "fragment": 0, "version": 0, "tokens": 1e999}',
    b'{"event": "offer", "site": "a", "fragment": 1e999, "version": 0, "tokens": 1, "nbytes": 1}',
    b'{"event": "offer", "site": "a", "fragment": 7, "version": 0, "tokens": 1, "nbytes": 10}',
    b'{"event": "offer", "site": "a", "fragment": -1, "version": 0, "tokens": 1, "nbytes": 10}',
    b"[" * 200_000,
]


def test_wrong_numbers_on_a_tape_change_nothing_and_stop_nobody(request: pytest.FixtureRequest) -> None:
    store = open_store(f"memory://{request.node.name}")
    run_sites(ThreadSite(store, make_terms(), "a"))
    before = contribution(store, "a"), look(store)
    pieces, wrong = len(store.list(keys.tape_prefix("a"))), b"\n".join(WRONG_LINES)
    store.put(keys.tape("a", pieces, sha256_hex(wrong)), wrong)
    assert contribution(store, "a") == before[0]
    now = look(store)
    assert (now.sites, now.fragments, now.bytes) == (before[1].sites, before[1].fragments, before[1].bytes)


def test_a_site_that_never_came_is_said_so(request: pytest.FixtureRequest) -> None:
    store = open_store(f"memory://{request.node.name}")
    run_sites(ThreadSite(store, make_terms(), "a"))
    with pytest.raises(BadInput, match=r"site bob never came to run run; a did: wait until it has started"):
        contribution(store, "bob")
