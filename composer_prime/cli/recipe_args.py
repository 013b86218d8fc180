"""What every command that takes a recipe shares: `RECIPE [--a.b value | @ more.toml ...]`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from composer_prime.errors import BadInput

if TYPE_CHECKING:
    from composer_prime.config import PrimeRecipe, Recipe

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A TOML file. Settings after it override it: --outer.lr 0.5, --clean, @ more.toml.",
        show_default=False,
    ),
]

ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue from the bucket and the local checkpoints.")]

DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help='With site.backend "prime-rl": render and check its configuration, start nothing.'),
]


def read_recipe(recipe: str, overrides: Sequence[str]) -> "Recipe | PrimeRecipe":
    """The recipe a command line names; `@ file.toml` in place of RECIPE works too. Raises BadInput.

    What is allowed and hardly meant is said on standard error.
    """
    from composer_prime.config import load_any

    if recipe.startswith("-"):
        raise BadInput(f"RECIPE must come before the settings, but {recipe} stands first: write RECIPE {recipe}")
    found = load_any(None, [recipe, *overrides]) if recipe.startswith("@") else load_any(Path(recipe), overrides)
    for warning in found.warnings():
        typer.echo(f"warning: {warning}", err=True)
    return found


def check_dry_run(dry_run: bool) -> None:
    """Raise BadInput when embedded sites shall start without starting."""
    if dry_run:
        raise BadInput(
            '--dry-run checks a PRIME-RL configuration, and this recipe\'s site.backend is "embedded": see what it '
            "means with `composer-prime plan`"
        )
