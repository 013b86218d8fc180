"""Whose output folder this is: one run per folder, continued with --resume, deleted with --clean, never mixed.

Everything is decided before anything starts, from the recipe that the folder holds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.config.load import any_from_data
from composer_prime.config.paths import RunPaths, run_uri
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import TINY_MODELS, Recipe, RecipeBase
from composer_prime.errors import BadInput, ConfigError
from composer_prime.sites.embedded.result import write_whole
from composer_prime.sites.embedded.supervisor import lock_site
from composer_prime.store import keys, open_store
from composer_prime.sync.deleting import Beats, delete_run, is_roundless, refuse_live

MAY_DIFFER = (
    "output_dir", "clean", "site", "sites", "launch", "ckpt", "inference.server",
    "inference.max_batch_size", "max_steps", "monitors",
)  # fmt: skip
"""Settings that a resumed run or a joining site may change: they move files, ports, batching, not what is learned. How
long an outer run goes on its bucket says, and refuses a site that has it otherwise."""

PRIME_RL_MAY_DIFFER = (
    "output_dir", "clean", "site.key_file", "site.name", "site.same_name", "sites", "ckpt",
    "prime_rl", "inference",
    "launch", "deployment", "slurm", "env_vars", "log", "monitors", "weight_broadcast", "rollout_transport",
    "orchestrator.concurrency", "orchestrator.model.client", "orchestrator.env_server_base_port", "orchestrator.log",
    "trainer.log", "trainer.env_vars", "orchestrator.env_vars", "trainer.metrics_server",
    "trainer.dist_timeout_seconds", "max_steps",
)  # fmt: skip
"""The same of a run whose sites are PRIME-RLs: where it runs and how it is watched."""


@dataclass(frozen=True)
class Claim:
    """A run's folder, and what --clean deletes when `take` is called, after the last check.

    old     the folder that goes; None: none does
    beats   of the run in the bucket, where that goes too (`deleting.refuse_live`)
    """

    recipe: RecipeBase
    paths: RunPaths
    old: Path | None = None
    beats: Beats | None = None

    def take(self) -> None:
        """Delete what goes, and write the recipe. Raises BadInput, and deletes nothing, where a site runs by now."""
        if self.old is not None:
            self.check()
            uri = run_uri(self.recipe)
            if self.beats is not None and uri is not None:
                with closing(open_store(uri, self.recipe.site.key_file)) as store:
                    delete_run(store, self.beats)
                if _is_folder(uri):
                    shutil.rmtree(uri.removeprefix("file://"), ignore_errors=True)
            if self.old.exists():
                shutil.rmtree(self.old)
        self.paths.root.mkdir(parents=True, exist_ok=True)
        if not self.paths.recipe.exists():
            write_whole(self.paths.recipe, json.dumps(self.recipe.to_data(), indent=2) + "\n")

    def check(self) -> None:
        """Raise BadInput where a site runs in the folder that goes."""
        for site in self.paths.sites.glob("*/"):
            if self.old in (self.paths.root, site):
                lock_site(self.paths.site(site.name)).close()


def claim_run_folder(recipe: RecipeBase, resume: bool) -> Claim:
    """See that a whole local run may have its folder, which is taken by `Claim.take`.

    A new run wants an empty place; `recipe.clean` empties it (the bucket too, when that is a folder or its run made
    no round); `resume` wants the same recipe where there is one, and wins over `clean`: then nothing is deleted.

    Raises BadInput when the folder holds something else.
    """
    paths = RunPaths.of(recipe)
    claim = Claim(recipe, paths)
    if resume:
        check_same_recipe(recipe, paths)
    elif recipe.clean:
        claim = _cleaning(recipe, paths)
    elif _occupied(paths.root):
        raise BadInput(
            f"output folder {paths.root} already holds another run: continue it with --resume, delete it with --clean, "
            "or give this run another --run.name"
        )
    return claim


def claim_site_folder(recipe: RecipeBase, site: str, resume: bool) -> Claim:
    """As `claim_run_folder`, for one site that joins a run, whose other sites may lie beside it.

    `recipe.clean` deletes this site's folder only.
    """
    paths = RunPaths.of(recipe)
    check_same_recipe(recipe, paths)
    root = paths.site(site).root
    if not resume and _occupied(root):
        if not recipe.clean:
            raise BadInput(
                f"folder {root} already holds a site {site}: continue it with --resume, delete it with --clean, or "
                "start a site of another name with --site"
            )
        claim = Claim(recipe, paths, root)
        claim.check()
        return claim
    return Claim(recipe, paths)


def check_same_recipe(recipe: RecipeBase, paths: RunPaths) -> None:
    """Raise ConfigError when the folder's run was started from a recipe that would train something else."""
    others = _holds_others(paths)  # before the recipe, which a site that starts just now writes first
    if not paths.recipe.exists():
        if others:
            raise BadInput(f"output folder {paths.root} holds files but no run: choose another --run.name")
        return
    held = flat(any_from_data(json.loads(paths.recipe.read_text(encoding="utf-8"))).to_data())
    ours = flat(recipe.to_data())
    may_differ = PRIME_RL_MAY_DIFFER if isinstance(recipe, PrimeRecipe) else MAY_DIFFER
    differing = sorted(key for key in held.keys() | ours.keys() if held.get(key) != ours.get(key))
    differing = [key for key in differing if not any(key == may or key.startswith(f"{may}.") for may in may_differ)]
    if _first_policy_differs(recipe, held):
        differing.append("site.device")
    if differing:
        changes = ", ".join(f"{key} ({ours.get(key)}, there: {held.get(key)})" for key in differing)
        raise ConfigError(
            f"recipe differs from that of the run in {paths.root}: {changes}; use the values there, or give the new "
            "run another --run.name"
        )


def _first_policy_differs(recipe: RecipeBase, held: Mapping[str, Any]) -> bool:
    """Whether this device would make another first policy than the run began with, and hints' teacher is that."""
    if not isinstance(recipe, Recipe) or not recipe.holds_first_policy:
        return False
    return recipe.model.name in TINY_MODELS and recipe.site.device != held["site.device"]


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted key; lists stay whole."""
    if not isinstance(data, dict):
        return {prefix: data}
    return {
        key: value
        for name, inner in data.items()
        for key, value in flat(inner, f"{prefix}.{name}" if prefix else name).items()
    }


def _occupied(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _holds_others(paths: RunPaths) -> bool:
    """Whether anything but the recipe is there; one that is being written has a longer name around the same."""
    return paths.root.is_dir() and any(paths.recipe.name not in entry.name for entry in paths.root.iterdir())


def _cleaning(recipe: RecipeBase, paths: RunPaths) -> Claim:
    if _occupied(paths.root) and not paths.recipe.exists():
        raise BadInput(
            f"output folder {paths.root} holds files but no run, so --clean won't delete it: delete it yourself, "
            "or choose another --run.name"
        )
    claim = Claim(recipe, paths, paths.root if _occupied(paths.root) else None)
    claim.check()
    if (uri := run_uri(recipe)) is None:
        return claim
    with closing(open_store(uri, recipe.site.key_file)) as store:
        if not any(map(store.list, (keys.manifest(), keys.founding(), keys.sites_prefix()))):
            return claim
        if not _is_folder(uri) and not is_roundless(store):
            raise BadInput(
                f"bucket {uri} holds a run that made rounds, so --clean won't delete it: continue it with --resume, "
                f"delete it with `composer-prime delete {uri}`, or choose another --run.name"
            )
        return Claim(recipe, paths, paths.root, refuse_live(store))


def _is_folder(uri: str) -> bool:
    return "://" not in uri.removeprefix("file://")
