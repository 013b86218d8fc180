"""The recipe as it travels in an invitation: what all sites share, and nothing that is one machine's own affair.

`allowed` lists what that may be. What is a machine's own is left out when an invitation is written; anything else that
isn't listed is refused, when one is written and when one is read.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_prime.config.load import any_from_data
from composer_prime.config.prime_rl import PORTS, PrimeRecipe
from composer_prime.config.recipe import RecipeBase
from composer_prime.config.toml import read_toml, to_toml
from composer_prime.errors import ConfigError, InvitationRefused
from composer_prime.volunteers.allowed import EMBEDDED, PRIME_RL, Rule, is_table, refusals, shown
from composer_prime.volunteers.upstream import machines_own

LOCAL_KEYS = (
    "output_dir", "clean", "sites", "launch", "site.name", "site.key_file", "site.same_name", "site.exact_join_s",
    "site.device", "site.threads", "site.micro_batch_tokens", "site.max_mbit_up", "site.max_mbit_down",
    "inference.python", "inference.server", "prime_rl.command", "prime_rl.first_port", "env_vars", "slurm", "log",
    "monitors",
    "outer.store", "outer.owner", "outer.keys", "hints.api_key_var", *(name for name in PORTS if name.endswith("port")),
)  # fmt: skip
"""Settings that are each machine's own."""
TRUST = "trust_remote_code"
MOST_CHARACTERS = 2**16
"""Of a recipe."""


def shared_toml(recipe: RecipeBase) -> str:
    """The recipe as an invitation holds it. Raises ConfigError where a setting can't just be left out."""
    data, rules = recipe.to_data(), EMBEDDED
    if isinstance(recipe, PrimeRecipe):
        rules = PRIME_RL
        for each in machines_own(data):
            if not each.listed and (each.key != TRUST or each.value is False):
                each.table.pop(each.key, None)
    for table, name in _local(data):
        table.pop(name.rpartition(".")[2])
    _drop_empty(data, "", rules)
    for refused in refusals(data):
        raise ConfigError(f"the recipe sets {refused}: give a recipe that does without (--recipe)")
    any_from_data(data)  # it must still be one
    text = to_toml(data)
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"the recipe has {len(text)} characters, an invitation's at most {MOST_CHARACTERS}: cut it")
    return text


def read_shared(text: str) -> RecipeBase:
    """The recipe in an invitation. Raises InvitationRefused where it sets what no invitation may, else ConfigError."""
    if len(text) > MOST_CHARACTERS:
        raise InvitationRefused(
            f"the invitation's recipe has {len(text)} characters, of {MOST_CHARACTERS} at most: ask for another one"
        )
    try:
        data = read_toml(text)
    except ValueError as error:
        raise ConfigError(f"the invitation's recipe isn't TOML ({shown(str(error))}): ask for another one") from None
    for refused in refusals(data):
        raise InvitationRefused(
            f"the invitation's recipe sets {refused}: ask the run's owner for an invitation that this version's "
            "`composer-prime invite` wrote"
        )
    return any_from_data(data)


def _drop_empty(data: dict[str, Any], place: str, rules: Mapping[str, Rule]) -> None:
    """Take out tables of which nothing is left, unless their being there says something."""
    for key, value in list(data.items()):
        name = f"{place}.{key}" if place else key
        if isinstance(value, dict):
            _drop_empty(value, name, rules)
            if not value and not is_table(name, rules):
                del data[key]


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
