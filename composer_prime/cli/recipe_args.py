"""What every command that takes a recipe shares: `RECIPE [--a.b value | @ more.toml ...]`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from composer_prime.errors import BadInput

if TYPE_CHECKING:
    from composer_prime.config import Recipe

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A TOML file. Settings after it override it: --outer.lr 0.5, --clean, @ more.toml.",
        show_default=False,
    ),
]

ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue from the bucket and the local checkpoints.")]


def read_recipe(recipe: str, overrides: Sequence[str]) -> "Recipe":
    """The recipe a command line names; `@ file.toml` in place of RECIPE works too. Raises BadInput."""
    from composer_prime.config import load_recipe

    if recipe.startswith("@"):
        return load_recipe(None, [recipe, *overrides])
    if recipe.startswith("-"):
        raise BadInput(f"RECIPE must come before the settings, but {recipe} stands first: write RECIPE {recipe}")
    return load_recipe(Path(recipe), overrides)
