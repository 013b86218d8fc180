"""Plays seeds, or one seed again.

python -m tests.simulation --seeds 0:10000 --jobs 2    many: events, seeds a second, violations, the coverage table
python -m tests.simulation --seeds 0:10000 --coverage docs/simulation-coverage.md    that table as a page, too
python -m tests.simulation --seed 123                  one, with its log of requests and faults
python -m tests.simulation --seed 123 --sites 3 --faults 0,4   as a failing seed was shrunk
"""

import argparse
import sys
from pathlib import Path

from tests.simulation.many import play_many
from tests.simulation.plan import draw_plan
from tests.simulation.world import Result, run_plan


def play_one(seed: int, sites: int | None, faults: str | None) -> int:
    """Play one seed and print all that happened."""
    plan = draw_plan(seed)
    if faults is not None:
        plan = plan.keep([int(place) for place in faults.split(",") if place])
    if sites is not None:
        plan = plan.with_sites(sites)
    result = run_plan(plan, record=True)
    for entry in result.log:
        print(f"{entry[0]:10.3f}", *entry[1:])
    _print_plan(result)
    return len(result.violations)


def _print_plan(result: Result) -> None:
    print(result.plan.terms)
    for place, fault in enumerate(result.plan.faults):
        print(f"fault {place}: {fault}")
    print(f"{result.plan.num_sites} sites, {result.num_events} events, ended at {result.ended_at_s:.1f} s")
    print(result.events)
    print(f"log {result.log_sha256}")
    for violation in result.violations:
        print(f"VIOLATION {violation}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200", help="first:stop")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--coverage", type=Path, metavar="FILE", help="write the coverage table there, as Markdown")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--sites", type=int)
    parser.add_argument("--faults", help="places, with commas, of the faults to keep")
    given = parser.parse_args()
    if given.seed is not None:
        return int(play_one(given.seed, given.sites, given.faults) > 0)
    if given.coverage is not None and not given.coverage.parent.is_dir():
        parser.error(f"--coverage {given.coverage}: no folder {given.coverage.parent}")
    first, stop = map(int, given.seeds.split(":"))
    return int(play_many(first, stop, given.jobs, given.coverage) > 0)


if __name__ == "__main__":
    sys.exit(main())
