"""The recipe as it travels in an invitation: what all sites share, and nothing that is one machine's own affair.

Some settings would run programs of the owner's choice on the volunteer's machine, or send the volunteer's secrets
elsewhere. They are left out when an invitation is written, and refused when one is read.
"""

import tomllib
from collections.abc import Iterator
from typing import Any

from composer_prime.config.load import any_from_data
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import RecipeBase
from composer_prime.config.toml import to_toml
from composer_prime.errors import ConfigError, InvitationRefused
from composer_prime.volunteers.upstream import machines_own

LOCAL_KEYS = (
    "output_dir", "clean", "sites", "site.name", "site.key_file", "site.same_name", "site.exact_join_s", "site.threads",
    "site.micro_batch_tokens", "site.max_mbit_up", "site.max_mbit_down", "inference.python", "inference.server",
    "prime_rl.command", "env_vars", "slurm", "outer.store", "outer.owner", "outer.keys",
)  # fmt: skip
"""Settings that are each machine's own."""
TRUST = "trust_remote_code"


def shared_toml(recipe: RecipeBase) -> str:
    """The recipe as an invitation holds it. Raises ConfigError where a setting can't just be left out."""
    data = recipe.to_data()
    if isinstance(recipe, PrimeRecipe):
        own = machines_own(data)
        kept = [each.name for each in own if each.listed or (each.key == TRUST and each.value is not False)]
        if kept:
            raise ConfigError(
                f"the recipe sets {', '.join(sorted(kept))}, which no invitation may set on a volunteer's machine: "
                "give a recipe that needs none (--recipe)"
            )
        for each in own:
            each.table.pop(each.key, None)
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
    names = sorted({name for _, name in _local(data)} | _upstream_names(data))
    if names:
        raise InvitationRefused(
            f"the invitation's recipe sets {', '.join(names)}, which is each machine's own affair: ask the run's owner "
            "for one that `composer-prime invite` wrote"
        )
    return any_from_data(data)


def _upstream_names(data: dict[str, Any]) -> set[str]:
    """Settings in PRIME-RL's tables that no invitation may make; only a recipe for it has any."""
    site = data.get("site")
    is_prime = isinstance(site, dict) and site.get("backend") == "prime-rl"
    return {each.name for each in machines_own(data)} if is_prime else set()


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
