"""Which runs an ablation is made of, where each leaves its files, and which of them are done already."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from composer_prime.ablate.rows import Row, load_row
from composer_prime.config.ablate import Arm
from composer_prime.config.load import recipe_from_data
from composer_prime.config.paths import RunPaths
from composer_prime.config.recipe import Recipe
from composer_prime.errors import BadInput


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
