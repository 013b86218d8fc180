"""Which runs an ablation is made of, where each leaves its files, and which of them are done already.

A run that is done has a row, a small JSON file that the report, a dry run and a resume read. It is written last and
whole, so that a run has either all of its numbers or none.
"""

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field

from composer_prime import metrics
from composer_prime.config.ablate import Arm
from composer_prime.config.load import recipe_from_data
from composer_prime.config.paths import RunPaths
from composer_prime.config.recipe import Recipe
from composer_prime.config.table import Table
from composer_prime.errors import BadInput
from composer_prime.metrics import read_tape


class Row(Table, extra="ignore"):
    """One (arm, seed) that is done, all its sites together."""

    arm: str
    seed: int
    recipe_sha256: str
    """Of the arm's effective recipe (`Arm.sha256`)."""

    held_out_prompts: int = Field(ge=1)
    held_out: float
    """Mean reward of the final weights on the held-out tasks, greedy."""

    held_out_s: float = Field(ge=0)
    """Seconds that one held-out evaluation took."""

    start: float | None = None
    """Held-out reward of the model that it began with; rows of the first arm and of restarts have it."""

    restarted_from: str | None = None
    """The arm whose final weights a restart began with."""

    steps: int = Field(ge=1)
    """Training steps of a site."""

    rollouts: int = Field(ge=0)
    generated_tokens: int = Field(ge=0)
    """Tokens that the policy generated, also those that no step trained on, and again after a resume."""

    unanswered_tokens: int = Field(default=0, ge=0)
    """Of these, the tokens for which every replay teacher dropped out."""

    run_s: float = Field(ge=0)
    """Seconds from the command's start to its end, over all its starts but those that were killed (SIGKILL)."""

    rewards: tuple[float, ...]
    """Mean training reward over the sites by step, of the steps that had one."""

    @property
    def reward_mean(self) -> float:
        """Area under the curve of training reward, a step being 1/steps wide: the mean over the steps."""
        return fmean(self.rewards) if self.rewards else math.nan

    @property
    def seconds(self) -> float:
        """What the arm cost: the run and its held-out evaluation, without that of the untrained model."""
        return self.run_s + self.held_out_s


def load_row(path: Path) -> Row | None:
    """The row in that file; None when there is none."""
    try:
        return Row.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def read_measured(paths: RunPaths) -> dict[str, Any]:
    """What a finished run's folder says, by the names of a row."""
    from composer_prime.sites.embedded.summary import read_progress
    from composer_prime.teachers.stamp import REPLAY_UNANSWERED

    summary = json.loads(paths.summary.read_text(encoding="utf-8"))
    names = list(summary["sites"])
    curves = [read_progress(paths.site(name)).trained_rewards() for name in names]
    steps = sorted({step for curve in curves for step in curve})
    tape = [record for name in names for record in read_tape(paths.site(name).tape("orchestrator"))]

    def total(name: str) -> int:
        return int(sum(record.get(name, 0.0) for record in tape))

    return {
        "steps": max(site["steps"] for site in summary["sites"].values()),
        "rollouts": total(metrics.ROLLOUT_COUNT),
        "generated_tokens": total(metrics.ROLLOUT_TOKENS),
        "unanswered_tokens": total(REPLAY_UNANSWERED),
        "run_s": summary["wall_s"],
        "rewards": tuple(fmean(curve[step] for curve in curves if step in curve) for step in steps),
    }


@dataclass(frozen=True, eq=False)
class Job:
    """One run: an arm with a seed. Equal to itself only, so that it can be a key.

    recipe           what `composer-prime run` trains, with the run's own name, seed and folder
    judged_by        its own with the tasks and sites of the first arm's: all arms are judged on what that holds out
    measures_start   whether the untrained model is evaluated too, once a seed
    before           of a restart: the runs of its seed of which it goes on from the best
    """

    arm: Arm
    seed: int
    recipe: Recipe
    judged_by: Recipe
    folder: Path
    prompts: int
    measures_start: bool
    before: tuple["Job", ...] = ()

    @property
    def label(self) -> str:
        """As people read it."""
        return f"{self.arm.name} seed {self.seed}"

    @property
    def file(self) -> str:
        return f"{self.arm.slug}-s{self.seed}"

    @property
    def row(self) -> Path:
        return self.folder / "rows" / f"{self.file}.json"

    @property
    def recipe_file(self) -> Path:
        return self.folder / "recipes" / f"{self.file}.toml"

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.file}.log"

    @property
    def run(self) -> RunPaths:
        return RunPaths.of(self.recipe)

    def finished(self) -> Row | None:
        """Its row when that is of this recipe and these held-out tasks; None when there is work left."""
        row = load_row(self.row)
        if row is None or (row.recipe_sha256, row.held_out_prompts) != (self.arm.sha256, self.prompts):
            return None
        return None if self.measures_start and row.start is None else row


def plan_jobs(arms: Sequence[Arm], num_seeds: int, prompts: int) -> tuple[Job, ...]:
    """The runs, seed by seed, so that all arms can be compared as soon as a seed is through.

    Seeds count up from the recipe's run.seed. Everything lies in `<output_dir>/<run.name>-ablation`.

    Raises BadInput when the folder holds runs of other recipes: they stay, and nothing starts.
    """
    first = arms[0].recipe.run
    folder = (arms[0].recipe.output_dir / f"{first.name}-ablation").absolute()
    jobs: list[Job] = []
    for seed, arm in product(range(first.seed, first.seed + num_seeds), arms):
        signals = tuple(job for job in jobs if job.seed == seed and job.arm.harm is None)
        jobs.append(
            Job(
                arm,
                seed,
                _run_recipe(arm.recipe, arm, seed, folder),
                _run_recipe(_judged_by(arm.recipe, arms[0].recipe), arm, seed, folder),
                folder,
                prompts,
                measures_start=arm is arms[0],
                before=signals if arm.harm == "restart" else (),
            )
        )
    for job in jobs:
        _check_folder(job)
    return tuple(jobs)


def _judged_by(recipe: Recipe, first: Recipe) -> Recipe:
    """The recipe with the first one's tasksets and sites, so that both hold out the same tasks."""
    data, tasks = recipe.to_data(), first.to_data()
    agents = {source["name"]: source["env"]["agent"] for source in data["orchestrator"]["train"]["source"]}
    sources = tasks["orchestrator"]["train"]["source"]
    for source in sources:
        source["env"]["agent"] = agents.get(source["name"], source["env"]["agent"])
    data["orchestrator"]["train"]["source"] = sources
    return recipe_from_data({**data, "sites": tasks["sites"], "outer": tasks.get("outer")})


def _run_recipe(recipe: Recipe, arm: Arm, seed: int, folder: Path) -> Recipe:
    data = recipe.to_data()
    run = {**data["run"], "name": f"{data['run']['name']}-{arm.slug}-s{seed}", "seed": seed}
    if arm.harm == "placebo":
        for site in recipe.site_names:
            own = data["sites"]["overrides"].setdefault(site, {})
            own["sampling_seed"] = zlib.crc32(f"placebo/{seed}/{site}".encode())
    if arm.harm == "restart":
        data["model"]["name"] = str(folder / "restarts" / f"s{seed}")
    return recipe_from_data({**data, "run": run, "output_dir": str(folder)})


def _check_folder(job: Job) -> None:
    row = load_row(job.row)
    differs = row is not None and row.recipe_sha256 != job.arm.sha256
    if not differs and job.run.recipe.exists():
        held = recipe_from_data(json.loads(job.run.recipe.read_text(encoding="utf-8")))
        differs = Arm(job.arm.name, (), held, job.arm.harm).sha256 != job.arm.sha256
    if differs:
        raise BadInput(
            f"{job.folder} holds {job.label} of another recipe: give this ablation another --run.name or --output_dir, "
            "or delete that folder"
        )
