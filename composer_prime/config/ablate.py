"""The arms of an ablation: a recipe, and the overrides that tell each arm from it. No torch.

An arm is spelled as overrides of the command line, so that `composer-prime run RECIPE OVERRIDES` trains the same.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from composer_prime.config.load import any_from_data, read_data
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import Recipe
from composer_prime.config.settings import data_shard
from composer_prime.errors import BadInput

BASE = "base"
ARM_NAME = r"\+?[a-z0-9][a-z0-9._-]{0,23}"
OWN_KEYS = ("run.name", "run.seed", "output_dir", "clean")
"""Settings that an ablation gives to each of its runs."""
NOT_LEARNED = (*OWN_KEYS, "launch", "ckpt", "inference.server", "hints.allow_live")
"""Settings that change files, ports and what is allowed, and nothing that a run learns or costs."""
OWN_TEACHER = ("weak-teacher", "permuted")
"""Arms whose replay teacher is the run's untrained first policy, which an ablation serves."""
PER_RUN = {"placebo": "sites.overrides", **dict.fromkeys(OWN_TEACHER, "replay.teachers"), "restart": "model.name"}
"""Arms that look for harm, with the setting that an ablation gives to each of their runs."""
_WEAK = '--replay.teachers=[{name="weak",base_url="http://127.0.0.1"}]'
"""Where each run has a port of its own."""


@dataclass(frozen=True)
class Arm:
    """One variant of the recipe.

    overrides   as after `composer-prime run RECIPE`: "--trainer.optim.lr=1e-3"
    recipe      what they give; run.seed and run.name are still the recipe's own
    harm        its name, of an arm of ours that looks for harm; its runs are further told apart by `PER_RUN`
    """

    name: str
    overrides: tuple[str, ...]
    recipe: Recipe
    harm: str | None = None

    @property
    def slug(self) -> str:
        """The name as a part of file names and of run.name."""
        return self.name.replace("+", "plus-")

    @property
    def sha256(self) -> str:
        """Hash of all that tells what is learned: equal for arms that can't differ."""
        told = effective(self.recipe)
        if self.harm is not None:
            own = PER_RUN.get(self.harm, "")
            told = {key: value for key, value in told.items() if not _is_under(key, (own,))} | {"harm": self.harm}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def read_arms(
    recipe: str, overrides: Sequence[str], further: Sequence[str] = (), *, harm: bool = True
) -> tuple[Arm, ...]:
    """The arms of a recipe: base and its teacher signals, each alone and together, then those that look for harm, then
    the further ones.

    recipe      a TOML file, or `@ file.toml` as its first token
    overrides   of every arm, as `load_any` takes them
    further     "NAME KEY=VALUE ..." each, overrides of the full recipe; one with the name of an arm that looks for harm
                takes its place

    A signal that the recipe doesn't have gives no arm: without [hints] and [replay] base is the recipe.

    Raises BadInput, in one line that names both, when two arms can't differ; ConfigError when an arm's recipe isn't
    one.
    """
    path, shared = (None, [recipe, *overrides]) if recipe.startswith("@") else (Path(recipe), list(overrides))
    full = _recipe_of(path, shared)
    given = [_parse_arm(text) for text in further]
    names = {name for name, _ in given}
    ours = [(name, settings) for name, settings in harm_arms(full) if harm and name not in names]
    arms = [
        Arm(name, settings, _recipe_of(path, [*shared, *settings]), name if (name, settings) in ours else None)
        for name, settings in [*signal_arms(full), *ours, *given]
    ]
    _check_names(arms)
    check_arms(arms)
    return tuple(arms)


def signal_arms(full: Recipe) -> list[tuple[str, tuple[str, ...]]]:
    """Name and overrides of base, of each signal that the recipe has alone, and of full where it has several."""
    off = _turned_off(full)
    alone = [(name, tuple(word for other, words in off.items() if other != name for word in words)) for name in off]
    base = (BASE, tuple(word for words in off.values() for word in words))
    return [base, *alone, ("full", ())] if len(off) > 1 else [base, *alone]


def harm_arms(full: Recipe) -> list[tuple[str, tuple[str, ...]]]:
    """Name and overrides of the arms that look for harm, as far as the recipe's signals give any: base with other
    sampling, hints that are another mistake's, a teacher that is no better, one that is confident and wrong, and the
    recipe once more from the best policy."""
    signals = dict(signal_arms(full))
    if len(signals) == 1:
        return []
    found = [("placebo", signals[BASE])]
    if full.hints is not None and not full.hints.shuffle:
        found.append(("wrong-hint", (*signals["+hint"], "--hints.shuffle=true")))
    if full.replay.teachers:
        found += [(name, (*signals["+replay"], _WEAK)) for name in OWN_TEACHER]
    return [*found, ("restart", ())]


def left_out(arms: Sequence[Arm]) -> list[str]:
    """A line for each reason why arms that look for harm aren't among these; none where none of them is."""
    names = {arm.name for arm in arms}
    if not any(arm.harm for arm in arms):
        return []
    reasons = {
        ("wrong-hint",): "its hints are shuffled already" if "+hint" in names else "the recipe has no hints",
        OWN_TEACHER: "the recipe has no replay teacher",
    }
    missing = [([name for name in group if name not in names], reason) for group, reason in reasons.items()]
    return [f"left out: {', '.join(group)}: {reason}" for group, reason in missing if group]


def _turned_off(full: Recipe) -> dict[str, tuple[str, ...]]:
    """For each signal of the recipe, by its arm's name, the overrides without it: its table goes, and where the recipe
    has a weight of it that is 0."""
    weights = full.to_data()["trainer"].get("distill", {})
    signals = {
        "+hint": (full.hints is not None, "--hints=None", "hint_tau"),
        "+replay": (bool(full.replay.teachers), "--replay.teachers=[]", "replay_tau"),
        "+pairs": (full.replay.pairs is not None, "--replay.pairs=None", None),
        "+traces": (full.replay.traces is not None, "--replay.traces=None", None),
    }
    return {
        name: (gone, f"--trainer.distill.{weight}=0.0") if weight in weights else (gone,)
        for name, (is_there, gone, weight) in signals.items()
        if is_there
    }


def _parse_arm(text: str) -> tuple[str, tuple[str, ...]]:
    try:
        name, *settings = shlex.split(text) or [""]
    except ValueError as error:
        raise BadInput(f'arm ({text}) can\'t be read: {error}: write --arm "NAME KEY=VALUE ..."') from error
    if not re.fullmatch(ARM_NAME, name):
        raise BadInput(
            f"arm name ({name!r}) must be 1 to 24 of a-z, 0-9, '.', '_' and '-', perhaps after a '+': choose another"
        )
    if not settings or not all(re.fullmatch(r"[^-=][^=]*=.*", each, re.DOTALL) for each in settings):
        raise BadInput(f'arm {name} needs settings as KEY=VALUE: write --arm "{name} trainer.optim.lr=1e-3", quoted')
    for each in settings:
        key = each.partition("=")[0]
        if _is_under(key, OWN_KEYS):
            raise BadInput(f"arm {name} sets {key}, which an ablation gives to each run itself: drop it")
    return name, tuple(f"--{each}" for each in settings)


def _recipe_of(path: Path | None, overrides: Sequence[str]) -> Recipe:
    found = any_from_data(read_data(path, overrides))
    if isinstance(found, PrimeRecipe):
        raise BadInput(
            'ablate runs embedded sites, and this recipe\'s site.backend is "prime-rl": run each arm with '
            "`composer-prime run`, or ablate a recipe of embedded sites"
        )
    if found.clean:
        raise BadInput("clean (true) would delete finished runs, which ablate keeps: drop it, or delete the folder")
    return found


def _check_names(arms: Sequence[Arm]) -> None:
    for one, other in combinations(arms, 2):
        if one.slug == other.slug:
            raise BadInput(f"arms {one.name} and {other.name} would share their folders: rename one")


def check_arms(arms: Sequence[Arm]) -> None:
    """Raise BadInput when two arms can't differ, or there is one arm only."""
    for one, other in combinations(arms, 2):
        if one.sha256 == other.sha256:
            raise BadInput(
                f"arm {other.name} can't differ from {one.name}: their recipes are equal in all that is learned; "
                "change a setting of one or drop it"
            )
    if len(arms) == 1:
        raise BadInput(
            f"{arms[0].name} is the only arm, since the recipe has neither [hints] nor [replay]: add one with --arm "
            '"NAME KEY=VALUE ..."'
        )


def effective(recipe: Recipe) -> dict[str, Any]:
    """What tells what a run learns, by dotted key: settings that nothing in this recipe reads are left out."""
    settings = _flat(recipe.to_data())
    ignored: list[str] = [*NOT_LEARNED]
    if recipe.hints is None:
        ignored.append("trainer.distill.hint_tau")
    if not recipe.replay.teachers:
        ignored += ["trainer.distill.replay_tau", "replay.teachers"]
    if not recipe.has_streams:
        ignored += ["trainer.distill", "trainer.loss.kwargs.replay_tau", "trainer.loss.kwargs.teacher_tau"]
    return {key: value for key, value in settings.items() if not _is_under(key, ignored)}


def tasks_of(recipe: Recipe) -> list[Any]:
    """What tells which tasks the sites of a recipe have."""
    data = recipe.to_data()
    tasks = [(source["name"], source["env"]["taskset"]) for source in data["orchestrator"]["train"]["source"]]
    return [tasks, [data_shard(recipe, name) for name in recipe.site_names]]


def _is_under(key: str, tables: Sequence[str]) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted key; lists stay whole, and an empty table is nothing."""
    if not isinstance(data, dict):
        return {prefix: data}
    return {
        key: value
        for name, inner in data.items()
        for key, value in _flat(inner, f"{prefix}.{name}" if prefix else name).items()
    }
