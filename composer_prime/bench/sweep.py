"""`composer-prime bench sweep`: real runs of several variants over several seeds, side by side in one table.

A variant is what one would write after `composer-prime run`: a recipe and overrides. All runs use the same seeds, so
rows differ by the variant alone; the three arms and the sweep in docs/benchmarks.md are made with it.
"""

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from composer_prime.config.paths import RunPaths
from composer_prime.errors import SiteError
from composer_prime.sites.embedded.summary import read_progress


@dataclass(frozen=True)
class Outcome:
    """One run: rewards are means over its sites.

    reward_last   of the last three steps
    reward_mean   over all steps: how soon it learned
    """

    reward_first: float
    reward_last: float
    reward_mean: float
    steps: int
    rollouts: int
    wall_s: float


def main(variants: Sequence[str], seeds: Sequence[int], output_dir: Path) -> None:
    """Run every variant with every seed, one after another, and print the table after each variant.

    Raises SiteError, with the end of its output, when a run fails.
    """
    outcomes: dict[str, list[Outcome]] = {}
    console = Console(width=None if sys.stdout.isatty() else 160)
    for number, variant in enumerate(variants):
        outcomes[variant] = [run_once(variant, seed, output_dir, f"sweep-{number}-{seed}") for seed in seeds]
        console.print(draw({variant: outcomes[variant]}, seeds), end="")
    console.print(draw(outcomes, seeds))


def run_once(variant: str, seed: int, output_dir: Path, name: str) -> Outcome:
    """One real run in processes of its own; what came out."""
    arguments = [*shlex.split(variant), "--run.seed", str(seed), "--run.name", name]
    command = [
        sys.executable,
        "-m",
        "composer_prime.cli.main",
        "run",
        *arguments,
        "--output_dir",
        str(output_dir),
        "--clean",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SiteError(f"{shlex.join(command)} ended with {ended.returncode}: {(ended.stdout + ended.stderr)[-2000:]}")
    return read_outcome(RunPaths((output_dir / name).absolute()))


def read_outcome(paths: RunPaths) -> Outcome:
    """What a finished run's folder says."""
    summary = json.loads(paths.summary.read_text())
    sites = summary["sites"].values()
    rewards = [list(read_progress(paths.site(name)).trained_rewards().values()) for name in summary["sites"]]
    rollouts = [
        int(record["rollout/count"])
        for name in summary["sites"]
        for record in map(json.loads, paths.site(name).tape("orchestrator").read_text().splitlines())
        if record["step"] < summary["sites"][name]["steps"]
    ]
    return Outcome(
        reward_first=statistics.mean(site["reward_first"] for site in sites),
        reward_last=statistics.mean(site["reward_last"] for site in sites),
        reward_mean=statistics.mean(reward for each in rewards for reward in each),
        steps=max(site["steps"] for site in sites),
        rollouts=sum(rollouts),
        wall_s=summary["wall_s"],
    )


def draw(outcomes: dict[str, list[Outcome]], seeds: Sequence[int]) -> Table:
    """A line a variant: means over the seeds, and the range of the last reward."""
    table = Table(title=f"seeds {', '.join(map(str, seeds))}", title_justify="left")
    table.add_column("variant", overflow="fold")
    for column in ("steps", "rollouts", "reward first", "last", "last, worst", "over all steps", "wall s"):
        table.add_column(column, justify="right")
    for variant, runs in outcomes.items():
        table.add_row(
            variant,
            f"{statistics.mean(run.steps for run in runs):.0f}",
            f"{statistics.mean(run.rollouts for run in runs):,.0f}",
            f"{statistics.mean(run.reward_first for run in runs):.3f}",
            f"{statistics.mean(run.reward_last for run in runs):.3f}",
            f"{min(run.reward_last for run in runs):.3f}",
            f"{statistics.mean(run.reward_mean for run in runs):.3f}",
            f"{statistics.mean(run.wall_s for run in runs):.0f}",
        )
    return table
