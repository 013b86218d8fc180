"""Whole runs in virtual time: no seed's faults break an invariant, and a seed is always the same run."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.architecture import REPOSITORY, source_files
from tests.simulation.__main__ import main
from tests.simulation.coverage import KNOWN, OUT_OF_REACH, Table
from tests.simulation.plan import EVERYONE, Fault, Plan, draw_plan
from tests.simulation.runtime import Events, Process, Scheduler, SimRuntime
from tests.simulation.shrink import command, shrink
from tests.simulation.world import run_plan, run_seed

NUM_SEEDS = 200
NUM_LONG_SEEDS = 3_000
SEED_WITH_PARTS_AND_FAULTS = 311


def check_seeds(first: int, stop: int) -> int:
    """Play seeds; a failing one is shrunk and shown as one command. Returns the events."""
    num_events = 0
    for seed in range(first, stop):
        result = run_seed(seed)
        num_events += result.num_events
        assert result.branches.keys() <= KNOWN, f"seed {seed} met branches that the table doesn't know"
        if result.violations:
            pytest.fail(f"{result.violations[0]}\nplay it again: {command(shrink(draw_plan(seed)))}")
    return num_events


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 50))
def test_no_seed_breaks_an_invariant(first: int) -> None:
    assert check_seeds(first, first + 50) > 50 * 1_000


@pytest.mark.long
@pytest.mark.parametrize("first", range(NUM_SEEDS, NUM_LONG_SEEDS, 200))
def test_no_seed_of_many_breaks_an_invariant(first: int) -> None:
    assert check_seeds(first, first + 200) > 200 * 1_000


@pytest.mark.parametrize("seed", [3, 17, 1000])
def test_a_seed_is_the_same_run_again(seed: int) -> None:
    first, again = run_seed(seed, record=True), run_seed(seed, record=True)
    assert first.log_sha256 == again.log_sha256
    assert (first.events, first.ended_at_s) == (again.events, again.ended_at_s)


def test_a_seed_is_the_same_run_in_another_process_that_hashes_otherwise() -> None:
    """No order comes from a set of names: each process draws its own hashes of them."""
    play = [sys.executable, "-m", "tests.simulation", "--seed", str(SEED_WITH_PARTS_AND_FAULTS)]
    processes = [
        subprocess.Popen(
            play, cwd=REPOSITORY, env=os.environ | {"PYTHONHASHSEED": hashes}, stdout=subprocess.PIPE, text=True
        )
        for hashes in ("1", "2")
    ]
    first, again = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert "/merged/" in first
    assert sum(line.split()[1:3] == ["--", "fault"] for line in first.splitlines()) > 3
    assert first == again


def test_events_are_counted_for_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, waited = Process.wait, []

    def heard(self: Process, seconds: float | None) -> bool:
        waited.append(wait(self, seconds))
        return waited[-1]

    monkeypatch.setattr(Process, "wait", heard)
    faults = Fault("loss", 0, at_s=5.0, for_s=60.0, amount=0.5), Fault("crash", 1, at_s=5.0, for_s=3.0)
    result = run_plan(plan_of(4, *faults), record=True)
    requests = [entry for entry in result.log if entry[1] != "--"]
    failed = [entry for entry in requests if isinstance(entry[-1], str) and len(entry) == 5]
    reads = [entry for entry in requests if entry[2] in ("get", "list") and len(entry) == 4]
    num_writes = len(requests) - len(failed) - len(reads)
    assert min(len(failed), len(reads), num_writes) > 0
    assert result.events == Events(len(reads), num_writes, len(failed), 2, waited.count(False))
    assert result.num_events == len(requests) + 2 + waited.count(False)


def test_shrinking_keeps_the_fault_that_matters() -> None:
    plans = (plan for plan in map(draw_plan, range(1000)) if len(plan.faults) > 5)
    plan = next(plan for plan in plans if plan.faults[3].site + 1 < plan.num_sites)
    needed = plan.faults[3]
    small = shrink(plan, lambda tried: needed in tried.faults)
    assert small.faults == (needed,)
    assert small.num_sites == max(1, needed.site + 1)
    assert command(small) == f'python -m tests.simulation --seed {plan.seed} --sites {small.num_sites} --faults "3"'


def plan_of(num_sites: int, *faults: Fault) -> Plan:
    """A drawn plan of so many sites, with these faults and no others."""
    plans = (plan for plan in map(draw_plan, range(10_000)) if plan.num_sites == num_sites)
    return replace(next(plan for plan in plans if not plan.signed), faults=faults)


@pytest.mark.parametrize("kind", ["outage", "restart"])
def test_what_befalls_all_sites_at_once_is_survived(kind: str) -> None:
    plan = plan_of(4)
    fault = Fault(kind, EVERYONE, at_s=0.4 * plan.length_s, for_s=20.0)
    result = run_plan(replace(plan, faults=(fault,)), record=True)
    assert result.violations == ()
    answered = [entry[0] for entry in result.log if entry[2] in ("get", "list") and len(entry) == 4]
    assert any(time < fault.at_s for time in answered)
    assert not any(fault.at_s < time < fault.at_s + fault.for_s for time in answered)
    starts = [entry[3] for entry in result.log if entry[2] == "start"]
    assert sorted(starts) == sorted([f"s{index:02d}" for index in range(4)] * (2 if kind == "restart" else 1))


def test_the_table_shows_branches_that_were_never_met() -> None:
    table = Table()
    table.add(["crash"], ["close: at once"])
    rows = {line.rsplit(maxsplit=2)[0]: line.split()[-2:] for line in str(table).splitlines()[1 : len(KNOWN) + 2]}
    assert rows["close: at once"] == ["1", "1"]
    assert rows["part: an offer excluded"] == [".", "."]
    assert rows.keys() >= KNOWN
    assert OUT_OF_REACH.keys() <= KNOWN


def test_the_page_has_every_cell_of_the_printed_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "coverage.md"
    monkeypatch.setattr(sys, "argv", ["simulation", "--seeds", "3:5", "--coverage", str(path)])
    assert main() == 0
    printed, written = capsys.readouterr().out.splitlines(), path.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in written if line.startswith("| ")]
    shown = {row[0]: row[1:] for row in rows}
    assert len(shown) > len(KNOWN)
    for line in printed[2 : len(shown)]:
        name = next(name for name in shown if line.startswith(f"{name}  "))
        assert shown.pop(name) == line.removeprefix(name).split()
    assert shown.keys() == {"", "seeds with it"}
    assert all(f"- {branch}: {why}." in written for branch, why in OUT_OF_REACH.items())
    assert re.search(r"2 seeds, .* sites and \d+ events each: \d+ reads, \d+ writes, ", printed[-1])


def test_a_fault_free_run_ends_with_a_close_record() -> None:
    result = run_plan(draw_plan(5).keep([]))
    assert result.violations == ()
    assert "end: without a close record" not in result.branches


def test_virtual_time_passes_on_each_process_own_clock() -> None:
    scheduler = Scheduler()
    process = Process(scheduler, "a", skew=2.0, offset_s=100.0)
    runtime, seen = SimRuntime(process), []

    def body() -> None:
        with (condition := runtime.condition()):
            assert condition.wait(timeout=3.0) is False
        seen.append((scheduler.time, runtime.now()))

    process.spawn(body)
    scheduler.run(10.0, 1_000)
    assert seen == [(1.5, 103.0)]


def test_a_killed_process_runs_no_further() -> None:
    scheduler = Scheduler()
    process, seen = Process(scheduler, "a"), []

    def body() -> None:
        process.wait(1.0)
        seen.append("late")

    process.spawn(body)
    scheduler.call_at(0.5, process.kill)
    scheduler.run(10.0, 1_000)
    assert seen == []


def test_no_production_module_knows_of_the_simulation() -> None:
    sources = source_files("composer_prime")
    assert len(sources) > 50
    telling = ("tests.simulation", "greenlet", "is_simulated", "SimRuntime")
    assert [path for path in sources if any(word in path.read_text(encoding="utf-8") for word in telling)] == []
