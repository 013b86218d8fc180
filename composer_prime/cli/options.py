"""What several commands take: RECIPE with its settings, STORE, and options of one meaning."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from composer_prime.errors import BadInput

if TYPE_CHECKING:
    from composer_prime.config import PrimeRecipe, Recipe

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A TOML file. Settings after it override it: --outer.lr 0.5, --clean, @ more.toml."
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


StoreArgument = Annotated[
    str,
    typer.Argument(
        metavar="STORE", help="The folder of one run: s3://bucket/prefix/run-name, gs://..., hf://..., or a plain path."
    ),
]


def check_run(uri: str) -> None:
    """Raise BadInput when the store holds no run, before a command imports what takes seconds."""
    from composer_prime.store import open_store
    from composer_prime.sync.lifetime import find_manifest

    with closing(open_store(uri)) as store:
        find_manifest(store)


AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="TERM",
        help="A term by which one site could ruin the run, by name: mean, tokens or steps; may be repeated.",
    ),
]
