"""Where things lie on a site's disk: the run's folder, the folder of each site, the cache of tiny models.

One place spells these names, so that the three processes of a site agree; keys in the bucket are store/keys.py's.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from composer_prime.config.recipe import RecipeBase

AVERAGE = "ema"
"""Folder in a broadcast that holds the weights of hints' teacher "ema"."""


@dataclass(frozen=True)
class SitePaths:
    """`<run>/sites/<site>`: all that one site writes, and no other site reads."""

    root: Path

    @property
    def settings(self) -> Path:
        """The site's resolved recipe, the one file its processes start from."""
        return self.root / "configs" / "recipe.json"

    @property
    def broadcasts(self) -> Path:
        return self.root / "broadcasts"

    def broadcast(self, version: int) -> Path:
        """Weights after `version` training steps; complete once the STABLE file is in it."""
        return self.broadcasts / f"step_{version}"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def journal(self) -> Path:
        """What offers leave behind if they are merged, written before they are made."""
        return self.root / "journal"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The trainer's state after `step` training steps."""
        return self.checkpoints / f"step_{step}"

    def log(self, role: str) -> Path:
        """What the process of that role (inference, orchestrator, trainer) printed."""
        return self.root / "logs" / f"{role}.log"

    def tape(self, role: str) -> Path:
        """The role's metrics, one JSON line a record."""
        return self.root / "metrics" / f"{role}.jsonl"

    def waiting(self, role: str) -> Path:
        """What the role waits for, or last did, where it was long (waiting.py)."""
        return self.root / "metrics" / f"{role}.waiting.json"

    @property
    def conversations(self) -> Path:
        """Some rollouts of each step for people to read, one JSON line each."""
        return self.root / "conversations.jsonl"

    @property
    def gates(self) -> Path:
        """What the orchestrator knows of how teachers compare with the policy."""
        return self.root / "gates.json"

    @property
    def loaded(self) -> Path:
        """What the trainer writes first, once it has imported and built all it needs."""
        return self.root / "loaded"

    @property
    def result(self) -> Path:
        """What the trainer writes last; its being there ends the site."""
        return self.root / "result.json"


@dataclass(frozen=True)
class RunPaths:
    """`<output_dir>/<run.name>`: one run on this machine."""

    root: Path

    @classmethod
    def of(cls, recipe: RecipeBase) -> "RunPaths":
        """The run's folder, absolute, so that it means the same in every process."""
        return cls((recipe.output_dir / recipe.run.name).absolute())

    @property
    def bucket(self) -> Path:
        """The bucket of a run whose recipe names no store."""
        return self.root / "bucket"

    @property
    def recipe(self) -> Path:
        """The recipe the folder belongs to; another run may not write here."""
        return self.root / "recipe.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def reward_plot(self) -> Path:
        return self.root / "reward.png"

    @property
    def sites(self) -> Path:
        return self.root / "sites"

    def site(self, name: str) -> SitePaths:
        return SitePaths(self.sites / name)


def store_uri(recipe: RecipeBase) -> str | None:
    """The store's URI, folders absolute; None without an outer loop."""
    if recipe.outer is None:
        return None
    store = recipe.outer.store
    if store is None:
        return str(RunPaths.of(recipe).bucket)
    return store.rstrip("/") if "://" in store else str(Path(store).expanduser().absolute())


def run_uri(recipe: RecipeBase) -> str | None:
    """The root of the run in the bucket, `<store>/<run.name>`; None without an outer loop."""
    store = store_uri(recipe)
    return None if store is None else f"{store}/{recipe.run.name}"


def models_cache() -> Path:
    """The folder of tiny models that were built on this machine, shared by all runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "composer-prime" / "models"
