"""Many seeds, over several processes of this machine, and the table of what they met."""

import gc
import multiprocessing
import time
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple

from tests.simulation.coverage import Table, page
from tests.simulation.plan import draw_plan
from tests.simulation.runtime import Events
from tests.simulation.shrink import command, shrink
from tests.simulation.world import run_seed

CHUNK = 10
"""Seeds that a process is given at once; after so many it looks for cycles, which on every allocation takes a tenth."""


def _leave_modules_alone() -> None:
    """What importing made is there to stay: looking for cycles in it would take as long as three seeds, each time."""
    gc.disable()
    gc.collect()
    gc.freeze()


class _Played(NamedTuple):
    seed: int
    num_sites: int
    events: Events
    violations: tuple[str, ...]
    faults: list[str]
    branches: list[str]


def _play(seed: int) -> _Played:
    if seed % CHUNK == 0:
        gc.collect()
    result = run_seed(seed)
    kinds = [fault.kind for fault in result.plan.faults]
    return _Played(seed, result.plan.num_sites, result.events, result.violations, kinds, list(result.branches))


def play_many(first: int, stop: int, jobs: int, coverage: Path | None = None) -> int:
    """Play seeds, print what came of it, write the table as a page where one is asked for; returns how many failed."""
    table, started, events, num_sites, failed = Table(), time.monotonic(), Events(), 0, []
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_leave_modules_alone) as pool:
        for played in pool.imap_unordered(_play, range(first, stop), CHUNK):
            events, num_sites = events + played.events, num_sites + played.num_sites
            table.add(played.faults, played.branches)
            if played.violations:
                failed.append(played.seed)
                print(f"seed {played.seed}: {played.violations[0]}", flush=True)
    seconds, num_seeds = time.monotonic() - started, stop - first
    print(table)
    print(
        f"{num_seeds} seeds, {num_sites / num_seeds:.2f} sites and {_each(events, num_seeds)}, "
        f"{num_seeds / seconds:.1f} seeds/s with {jobs} jobs, {seconds:.0f} s; {len(failed)} failed"
    )
    if coverage is not None:
        coverage.write_text(page(table, f"{first}:{stop}", coverage), encoding="utf-8")
    for seed in sorted(failed)[:5]:
        print(command(shrink(draw_plan(seed))))
    return len(failed)


def _each(events: Events, num_seeds: int) -> str:
    """Events of a seed, on average, and what they are."""
    reads, writes, failed, faults, wakeups = (number / num_seeds for number in astuple(events))
    return (
        f"{events.total / num_seeds:.0f} events each: {reads:.0f} reads, {writes:.0f} writes, {failed:.1f} failed "
        f"requests, {faults:.1f} faults, {wakeups:.0f} timed wake-ups"
    )
