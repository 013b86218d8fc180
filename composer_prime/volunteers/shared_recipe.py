"""The recipe as it travels in an invitation: what all sites share, and nothing that is one machine's own affair.

Some settings would run programs of the owner's choice on the volunteer's machine, or send the volunteer's secrets
elsewhere. They are left out when an invitation is written, and refused when one is read.
"""

import tomllib
from collections.abc import Iterator
from typing import Any

from composer_prime.config.load import any_from_data
from composer_prime.config.recipe import RecipeBase
from composer_prime.config.toml import to_toml
from composer_prime.errors import ConfigError, InvitationRefused

LOCAL_KEYS = (
    "output_dir", "clean", "sites", "site.name", "site.key_file", "site.same_name", "site.threads",
    "site.micro_batch_tokens", "site.max_mbit_up", "site.max_mbit_down", "inference.python", "inference.server",
    "prime_rl.command", "env_vars", "outer.store", "outer.owner", "outer.keys",
)  # fmt: skip
"""Settings that are each machine's own."""


def shared_toml(recipe: RecipeBase) -> str:
    """The recipe as an invitation holds it."""
    data = recipe.to_data()
    for table, name in _local(data):
        table.pop(name.rpartition(".")[2])
    any_from_data(data)  # it must still be one
    return to_toml(data)


def read_shared(text: str) -> RecipeBase:
    """The recipe in an invitation. Raises InvitationRefused where it sets what is this machine's, else ConfigError."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the invitation's recipe isn't TOML ({error}): ask for another one") from None
    names = sorted({name for _, name in _local(data)})
    if names:
        raise InvitationRefused(
            f"the invitation's recipe sets {', '.join(names)}, which is each machine's own affair: ask the run's owner "
            "for one that `composer-prime invite` wrote"
        )
    return any_from_data(data)


def _local(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(table, dotted name) of every local setting that is there."""
    found: list[tuple[dict[str, Any], str]] = []
    for name in LOCAL_KEYS:
        *path, last = name.split(".")
        table: Any = data
        for part in path:
            table = table.get(part) if isinstance(table, dict) else None
        if isinstance(table, dict) and last in table:
            found.append((table, name))
    replay = data.get("replay")
    teachers = replay.get("teachers", []) if isinstance(replay, dict) else []
    found += [
        (teacher, "api_key_var") for teacher in teachers if isinstance(teacher, dict) and "api_key_var" in teacher
    ]
    yield from found
