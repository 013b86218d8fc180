"""Many seeds, over several processes of this machine, and the table of what they met."""

import gc
import multiprocessing
import time

from tests.simulation.coverage import Table
from tests.simulation.plan import draw_plan
from tests.simulation.shrink import command, shrink
from tests.simulation.world import run_seed

CHUNK = 10
"""Seeds that a process is given at once; after so many it looks for cycles, which on every allocation takes a tenth."""


def _play(seed: int) -> tuple[int, int, tuple[str, ...], list[str], list[str], int]:
    if seed % CHUNK == 0:
        gc.collect()
    result = run_seed(seed)
    kinds = [fault.kind for fault in result.plan.faults] + (["racy"] if result.plan.racy else [])
    return seed, result.num_events, result.violations, kinds, list(result.branches), result.plan.num_sites


def play_many(first: int, stop: int, jobs: int) -> int:
    """Play seeds, print what came of it, and return how many failed."""
    table, started, num_events, num_sites, failed = Table(), time.monotonic(), 0, 0, []
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=gc.disable) as pool:
        for seed, events, violations, kinds, branches, sites in pool.imap_unordered(_play, range(first, stop), CHUNK):
            num_events, num_sites = num_events + events, num_sites + sites
            table.add(kinds, branches)
            if violations:
                failed.append(seed)
                print(f"seed {seed}: {violations[0]}", flush=True)
    seconds, num_seeds = time.monotonic() - started, stop - first
    print(table)
    print(
        f"{num_seeds} seeds, {num_sites / num_seeds:.2f} sites and {num_events / num_seeds:.0f} events each, "
        f"{num_seeds / seconds:.1f} seeds/s with {jobs} jobs, {seconds:.0f} s; {len(failed)} failed"
    )
    for seed in sorted(failed)[:5]:
        print(command(shrink(draw_plan(seed))))
    return len(failed)
