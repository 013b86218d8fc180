"""What infra/ starts, read as the command line would read it."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from composer_prime.config import load_any
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import Recipe
from tests.architecture import REPOSITORY

IN_IMAGE = "/opt/composer-prime/"
_VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")


def fill(text: str, variables: dict[str, str]) -> str:
    """`text` with $NAME, ${NAME} and ${NAME:-default} replaced."""
    return _VARIABLE.sub(lambda match: variables.get(match[1], match[2] or ""), text)


def read_site_command(command: Sequence[str] | str) -> tuple[str, Recipe | PrimeRecipe]:
    """(site, recipe with settings) of `[exec] composer-prime site RECIPE --site NAME --resume [settings]`.

    Fails where the command line would refuse it. A recipe's path is the repository's, or the image's.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    words = words[1:] if words[0] == "exec" else words
    assert words[:2] == ["composer-prime", "site"], words
    recipe, *rest = words[2:]
    assert rest[0] == "--site" and rest[2] == "--resume", "a site that was started again must go on"
    return rest[1], load_any(REPOSITORY / Path(recipe.removeprefix(IN_IMAGE)), rest[3:])
