"""A short storm on real processes and a real store: everything that can go wrong does, and nothing is lost."""

import random
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from tests.bench.storm import storm
from tests.bench.storm.book import Book, has_merged, newest_versions, read_book
from tests.bench.storm.faults import DECK, SCRIPTS, Fault, schedule
from tests.bench.storm.places import Place, Start
from tests.bench.storm.plan import Record, StormPlan, make_terms
from tests.bench.storm.reading import wanted_sites
from tests.bench.storm.report import StormReport
from tests.bench.storm.storm import run_storm

KINDS = ("kill", "stop", "cut", "burst", "restart", "join")


@pytest.mark.slow
@pytest.mark.s3
def test_a_storm_loses_nothing_and_ends_with_equal_masters(tmp_path: Path) -> None:
    plan = StormPlan(num_sites=4, duration_s=35, seed=3, num_faults=len(KINDS), kinds=KINDS, turn_s=2.0, liveness_s=4.0)
    report = run_storm(tmp_path, plan, reference_s=0)
    print(report.to_json())
    assert (report.hash_differences, report.log_faults, report.crashes) == ([], [], [])
    assert report.faults == dict.fromkeys(sorted(KINDS), 1) and report.faults_missed == 0
    assert report.faults_held == 3  # a kill, a stop and a cut, each in the middle of an upload
    assert report.participation > 0.8 and report.participation_of_all > 0.5
    assert len(report.sites) == plan.num_sites + 1  # one joined late
    assert report.not_rejoined == 0 and len(report.rejoin_s) == 1 and len(report.join_s) == 1
    for site in report.sites:
        assert not site.left_early
        # every token that a site's ledger calls merged is in the log, and none twice
        assert site.merged == site.logged > 0
        assert site.merged + site.dropped == site.trained <= site.made
    killed = [site for site in report.sites if site.processes > 1]
    assert len(killed) == 1
    assert sum(site.lost for site in report.sites) == sum(site.lost for site in killed)
    # what went with the killed process is younger than its checkpoint
    assert sum(site.lost for site in killed) <= plan.step_tokens * plan.checkpoint_steps


def report(**numbers: Any) -> StormReport:
    """A report in which nothing was counted, but for these."""
    blank: dict[str, Any] = {
        field.name: 0 for field in fields(StormReport) if field.default is field.default_factory is MISSING
    }
    return StormReport(**(blank | numbers))


@pytest.mark.parametrize(("found", "code"), [({}, 0), ({"hash_differences": ["f"]}, 1), ({"log_faults": ["f"]}, 1)])
def test_a_storm_in_which_masters_came_to_differ_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: dict[str, list[str]], code: int
) -> None:
    monkeypatch.setattr(storm, "run_storm", lambda *_: report(**found))
    monkeypatch.setattr(StormReport, "draw", lambda self: "")
    assert storm.main(folder=tmp_path) == code


def test_goodput_counts_late_sites_from_their_start_and_leavers_until_they_go(tmp_path: Path) -> None:
    def place(name: str, *starts: Start) -> Place:
        nothing: Any = None
        return Place(name, tmp_path, gate=nothing, config=nothing, nursery=nothing, starts=list(starts))

    plan = StormPlan(num_sites=2, duration_s=100)
    places = {name: place(name, Start(90.0, 1, "first")) for name in "ab"}
    places["late"] = place("late", Start(130.0, 2, "late"), Start(150.0, 3, "killed"))
    record = Record(plan, make_terms(plan, 1.0), "memory://", places, 0.0)
    record.faults = [Fault("leave", 175.0, "b", began_at=180.0), Fault("kill", 148.0, "late", began_at=149.0)]
    assert wanted_sites(record, 100.0, 200.0) == pytest.approx(1 + 0.8 + 0.7)
    reference = report(tokens_per_s=200.0, wanted_sites=2.0)
    assert report(tokens_per_s=240.0, wanted_sites=2.5).against(reference).goodput == pytest.approx(0.96)


def test_faults_are_spread_over_the_storm_in_their_shares() -> None:
    faults = schedule(seed=1, first_at=100.0, last_at=700.0, count=2 * len(DECK))
    assert sorted(fault.kind for fault in faults) == sorted(2 * DECK)
    assert [fault.due_at for fault in faults] == sorted(fault.due_at for fault in faults)
    assert all(100.0 < fault.due_at < 700.0 for fault in faults)
    assert [f.kind for f in schedule(1, 100.0, 700.0, 40)] == [fault.kind for fault in faults]
    assert set(DECK) < set(SCRIPTS)


def test_a_book_tells_of_a_process_since_it_joined_and_forgives_a_torn_line(tmp_path: Path) -> None:
    book = Book(tmp_path)
    assert newest_versions(tmp_path) == []
    book.write("joined", versions=[1, 0], merged=[10, 0])
    pid = read_book(tmp_path)[0]["pid"]
    assert not has_merged(tmp_path, pid)
    book.write("step", versions=[2, 1], merged=[10, 20])
    book.close()
    with (tmp_path / "book.jsonl").open("a") as file:
        file.write('{"event": "step", "vers')
    assert newest_versions(tmp_path) == [2, 1]
    assert has_merged(tmp_path, pid) and not has_merged(tmp_path, pid + 1)


def test_a_run_has_more_rounds_than_its_time_can_hold() -> None:
    plan = StormPlan(num_sites=random.Random(0).randrange(2, 17), duration_s=60)
    terms = make_terms(plan, round_s=plan.turn_s)
    assert terms.rounds * terms.fragments * plan.turn_s >= plan.duration_s
