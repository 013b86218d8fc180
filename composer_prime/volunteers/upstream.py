"""What PRIME-RL's own tables of a recipe would do on a volunteer's machine, told by the names of their keys.

Those tables pass through to PRIME-RL as they stand, so they are looked through wherever they go on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from composer_prime.config.prime_rl import PrimeRecipe

ENDINGS = ("_dir", "_path", "command", "env_vars", "trust_remote_code")
"""Keys that end so name folders, files and programs of a machine, set its variables, or run a model's own code."""
SHARED = ("model", "trainer", "orchestrator", "inference", "log", "ckpt", "monitors", "tokenizer", "weight_broadcast",
          "rollout_transport", "deployment")  # fmt: skip
"""PRIME-RL's tables that an invitation may hold."""


@dataclass(frozen=True)
class Setting:
    """One key of a table. `listed`: it stands in a list of tables, as environments do."""

    name: str
    table: dict[str, Any]
    key: str
    value: Any
    listed: bool


def settings(data: dict[str, Any]) -> Iterator[Setting]:
    """Every setting in the tables that PRIME-RL checks, and not we."""
    for name in SHARED:
        yield from _settings(data.get(name), name, listed=False)


def _settings(value: Any, name: str, *, listed: bool) -> Iterator[Setting]:
    if isinstance(value, list):
        for item in value:
            yield from _settings(item, name, listed=True)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield Setting(f"{name}.{key}", value, key, inner, listed)
            yield from _settings(inner, f"{name}.{key}", listed=listed)


def machines_own(data: dict[str, Any]) -> list[Setting]:
    """Settings that no invitation may make on a volunteer's machine."""
    return [setting for setting in settings(data) if setting.key.endswith(ENDINGS)]


def environments(recipe: PrimeRecipe) -> list[str]:
    """The packages that play rollouts: tasksets, harnesses and environments, by their ids."""
    found = {
        setting.value
        for setting in settings(recipe.to_data())
        if setting.name.startswith("orchestrator.") and setting.key == "id" and isinstance(setting.value, str)
    }
    return sorted(found)


def endpoints(recipe: PrimeRecipe) -> list[str]:
    """The addresses that the recipe names."""
    found: set[str] = set()
    for setting in settings(recipe.to_data()):
        values = setting.value if isinstance(setting.value, list) else [setting.value]
        found |= {value for value in values if isinstance(value, str) and value.startswith(("http://", "https://"))}
    return sorted(found)


def monitors(recipe: PrimeRecipe) -> list[str]:
    """Where PRIME-RL sends samples and metrics besides, by its names for such."""
    found = recipe.upstream.get("monitors")
    return sorted(set(found) - {"file"}) if isinstance(found, dict) else []
