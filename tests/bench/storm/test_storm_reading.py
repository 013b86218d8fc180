"""What a storm's report counts: who was live in a round and taken by it, how soon a killed site was merged again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_prime.store import keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.records import Claim
from composer_prime.sync.run import load_run
from composer_prime.sync.runtime import ThreadRuntime
from tests.bench.storm import reading as storm_reading
from tests.bench.storm.places import Place, Start
from tests.bench.storm.plan import Record, StormPlan, make_terms
from tests.sync.harness import ThreadSite, run_sites
from tests.sync.harness import make_terms as quick_terms

PLAN = StormPlan(num_sites=2, duration_s=100)
Line = dict[str, Any]


def record(*places: Place) -> Record:
    return Record(PLAN, make_terms(PLAN, 1.0), "memory://", {place.name: place for place in places}, 0.0)


def place(name: str, *starts: Start, down: tuple[tuple[float, float], ...] = ()) -> Place:
    nothing: Any = None
    return Place(name, Path(), gate=nothing, config=nothing, nursery=nothing, starts=list(starts), down=list(down))


def lines(pid: int, **events: float) -> list[Line]:
    return [{"pid": pid, "event": event, "t": at} for event, at in events.items()]


def closed(at: float, **taken: int) -> Any:
    """A round and the incarnation of each site that it took."""
    entries = [SimpleNamespace(site=site, incarnation=number) for site, number in taken.items()]
    return storm_reading._Closed(0, 0, at, SimpleNamespace(taken=entries))  # pyright: ignore[reportArgumentType]


def test_a_live_site_that_a_round_left_out_lowers_participation_and_one_that_was_kept_away_does_not() -> None:
    storm = record(place("a", Start(0, 1, "first")), place("b", Start(0, 2, "first"), down=((21.0, 29.0),)))
    books = {"a": lines(1, joined=1.0, step=60.0), "b": lines(2, joined=1.0, step=60.0)}
    rounds = [closed(10.0), closed(20.0, a=0, b=0), closed(30.0, a=0), closed(40.0, a=0), closed(50.0)]
    live, everyone = storm_reading._participation(storm, books, rounds)
    assert live == pytest.approx((1 + 1 + 1 / 2 + 0) / 4), "b is cut off in the third round, and late for the fourth"
    assert everyone == pytest.approx((1 + 1 / 2 + 1 / 2 + 0) / 4)


def test_a_site_counts_as_live_from_its_joining_until_its_process_last_wrote() -> None:
    storm = record(place("a", Start(0, 1, "first"), Start(25, 3, "killed")), place("b", Start(0, 2, "first")))
    books = {
        "a": [*lines(1, joined=1.0, step=14.0), *lines(3, joined=32.0, step=60.0)],
        "b": lines(2, joined=1, step=60),
    }
    rounds = [closed(10.0), closed(20.0, b=0), closed(30.0, b=0), closed(40.0, b=0), closed(50.0, b=0)]
    assert storm_reading._participation(storm, books, rounds) == (pytest.approx((1 + 1 + 1 + 1 / 2) / 4), 1 / 2)


def test_a_rejoin_lasts_from_the_new_process_until_a_round_takes_an_offer_of_that_process() -> None:
    store = MemoryStore("storm-reading")
    for number, pid in enumerate((1, 3, 4)):
        claim = Claim(site="a", incarnation=number, nonce=str(number), host="", pid=pid)
        store.create(keys.claim("a", number), claim.to_bytes())
    starts = (Start(0, 1, "first"), Start(20, 3, "killed"), Start(60, 4, "killed"))
    books = {"a": [*lines(1, started=0, joined=1), *lines(3, started=22, joined=24), *lines(4, started=62, joined=65)]}
    rounds = [closed(10, a=0), closed(26, a=0), closed(29, a=1), closed(33, a=1), closed(64, a=1)]
    found = storm_reading._first_merges(store, record(place("a", *starts)), books, rounds, "killed")
    assert found == [storm_reading._Came(joined_s=2, merged_s=7), None], "the last one came to no round any more"
    assert storm_reading._first_merges(store, record(place("a", *starts)), books, rounds, "late") == []
    again = (*starts, Start(70, 5, "killed"))
    found = storm_reading._first_merges(store, record(place("a", *again)), books, rounds[:2], "killed")
    assert found == [None], "who was killed again before it came to a round isn't counted, the last one is"


def test_a_site_that_ended_with_another_master_than_the_log_makes_is_a_difference() -> None:
    store = MemoryStore("storm-differences")
    run_sites(site := ThreadSite(store, quick_terms(), "a"))
    run, runtime = load_run(store), ThreadRuntime()
    masters = site.summary["masters"]

    def differences(**ends: list[Line]) -> list[str]:
        books = {name: [{"event": "ended", "finished": True, "masters": end}] for name, end in ends.items()}
        return storm_reading._compare_masters(store, run, runtime, books)

    assert differences(a=masters) == []
    assert differences() == ["no site came to the run's end"]
    (found,) = differences(a=masters, b=[masters[0], {**masters[1], "sha256": "f" * 64}])
    assert found.startswith(f"b ended with (4, '{'f' * 64}') of fragment 1, the log makes 4, ")
    (found,) = differences(b=[{**masters[0], "version": 3}, masters[1]])
    assert found.startswith("b ended with (3, ")
    assert storm_reading._verify(store) == []
    store.delete(keys.commit(1, 2))
    assert "is gone" in storm_reading._verify(store)[0]
    store.delete(keys.close())
    assert storm_reading._verify(store) == ["the run has no close record"]
    runtime.close()
