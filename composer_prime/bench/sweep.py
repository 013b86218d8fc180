"""`composer-prime bench sweep`: real runs of several variants over several seeds, side by side in one table.

A variant is what one would write after `composer-prime run`: a recipe and overrides. All runs use the same seeds, so
rows differ by the variant alone, and variants are compared seed by seed; the tables in docs/benchmarks.md are its.
"""

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from composer_prime.bench.held_out import final_weights_of, held_out_reward
from composer_prime.bench.paired import Difference, paired_difference
from composer_prime.config.paths import RunPaths
from composer_prime.config.settings import SiteSettings
from composer_prime.errors import BadInput, SiteError
from composer_prime.sites.embedded.summary import read_progress


@dataclass(frozen=True)
class Outcome:
    """One run: rewards are means over its sites.

    reward_last   of the last three steps
    reward_mean   over all steps: how soon it learned
    held_out      of the final masters, on tasks that no site trained on; None when that wasn't asked for, or when the
                  run had no outer loop
    """

    reward_first: float
    reward_last: float
    reward_mean: float
    steps: int
    rollouts: int
    wall_s: float
    held_out: float | None = None


def main(
    variants: Sequence[str],
    seeds: Sequence[int],
    output_dir: Path,
    baseline: int | None = None,
    held_out_prompts: int = 512,
) -> None:
    """Run every variant with every seed, one after another, and print the table after each variant.

    baseline           index of the variant that the others are compared with at the end; None: no comparison
    held_out_prompts   tasks on which each run's final masters are scored; 0: none

    Raises BadInput when there is no such variant, SiteError, with the end of its output, when a run fails.
    """
    if baseline is not None and not 0 <= baseline < len(variants):
        raise BadInput(f"--baseline ({baseline}) must be 0 to {len(variants) - 1}: the variants count from 0")
    if len(set(variants)) < len(variants) or len(set(seeds)) < len(seeds):
        raise BadInput("a variant or seed is given twice: drop one, its runs would be the same")
    outcomes: dict[str, list[Outcome]] = {}
    console = Console(width=None if sys.stdout.isatty() else 160)
    for number, variant in enumerate(variants):
        outcomes[variant] = [
            run_once(variant, seed, output_dir, f"sweep-{number}-{seed}", held_out_prompts) for seed in seeds
        ]
        console.print(draw({variant: outcomes[variant]}, seeds), end="")
    if len(outcomes) > 1:
        console.print(draw(outcomes, seeds))
    if baseline is not None:
        console.print(draw_differences(outcomes, variants[baseline]))
    console.print(f"load {os.getloadavg()[0]:.2f}")


def run_once(variant: str, seed: int, output_dir: Path, name: str, held_out_prompts: int = 0) -> Outcome:
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
    paths = RunPaths((output_dir / name).absolute())
    return replace(read_outcome(paths), held_out=_held_out(paths, held_out_prompts) if held_out_prompts else None)


def _held_out(paths: RunPaths, prompts: int) -> float | None:
    recipe = SiteSettings.load(next(folder for folder in sorted(paths.sites.glob("*/")))).recipe
    return None if recipe.outer is None else held_out_reward(recipe, final_weights_of(recipe), prompts=prompts)


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
    for column in ("steps", "rollouts", "reward first", "last", "last, worst", "over all steps", "held-out", "wall s"):
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
            _mean_held_out(runs),
            f"{statistics.mean(run.wall_s for run in runs):.0f}",
        )
    return table


def draw_differences(outcomes: dict[str, list[Outcome]], baseline: str) -> Table:
    """A line for each other variant: mean of the differences seed by seed, with its 95 % interval; a star: not zero."""
    table = Table(title=f"minus {baseline}, mean and 95 % t interval", title_justify="left")
    table.add_column("variant", overflow="fold")
    for column in ("last", "held-out"):
        table.add_column(column, justify="right")
    base = outcomes[baseline]
    for variant, runs in outcomes.items():
        if variant != baseline:
            last = paired_difference([run.reward_last for run in runs], [run.reward_last for run in base])
            table.add_row(variant, _spell(last), _spell(_held_out_difference(runs, base)))
    return table


def _held_out_difference(runs: Sequence[Outcome], base: Sequence[Outcome]) -> Difference | None:
    pairs = [(run.held_out, other.held_out) for run, other in zip(runs, base, strict=True)]
    known = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    return paired_difference(*zip(*known, strict=True)) if len(known) == len(pairs) else None


def _mean_held_out(runs: Sequence[Outcome]) -> str:
    known = [run.held_out for run in runs if run.held_out is not None]
    return f"{statistics.mean(known):.3f}" if len(known) == len(runs) else "-"


def _spell(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    if math.isnan(difference.half_width):
        return f"{difference.mean:+.4f} (one seed)"
    return f"{difference.mean:+.4f} +- {difference.half_width:.4f}{' *' if difference.is_clear else ''}"
