"""What PRIME-RL's own tables of a recipe say of a machine, told by the names of their keys.

Those tables pass through to PRIME-RL as they stand, so they are looked through wherever they go on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ENDINGS = ("_dir", "_path", "command", "env_vars", "trust_remote_code")
"""Keys that end so name folders, files and programs of a machine, set its variables, or run a model's own code."""
TABLES = ("model", "trainer", "orchestrator", "inference", "ckpt", "tokenizer", "weight_broadcast",
          "rollout_transport", "deployment")  # fmt: skip
"""PRIME-RL's tables that an invitation may hold settings of."""


@dataclass(frozen=True)
class Setting:
    """One key of a table. `listed`: it stands in a list of tables, as environments do."""

    name: str
    table: dict[str, Any]
    key: str
    value: Any
    listed: bool


def machines_own(data: dict[str, Any]) -> list[Setting]:
    """Settings that are each machine's own, by what their names end in."""
    found = [setting for name in TABLES for setting in _settings(data.get(name), name, listed=False)]
    return [setting for setting in found if setting.key.endswith(ENDINGS)]


def _settings(value: Any, name: str, *, listed: bool) -> Iterator[Setting]:
    if isinstance(value, list):
        for item in value:
            yield from _settings(item, name, listed=True)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield Setting(f"{name}.{key}", value, key, inner, listed)
            yield from _settings(inner, f"{name}.{key}", listed=listed)
