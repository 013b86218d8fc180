"""`composer-prime create`: a run in its bucket, before its sites start; from a model, or from another run's masters."""

from typing import Annotated, Literal

import typer

from composer_prime.cli.recipe_args import RecipeArgument, read_recipe


def create(
    context: typer.Context,
    recipe: RecipeArgument,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STORE",
            help="The folder of another run: its present masters become the first ones, whatever the recipe's model.",
        ),
    ] = None,
    weights: Annotated[
        Literal["auto", "now", "first-site"],
        typer.Option(
            help="Who writes the first masters: this command, from the model's checkpoint, or the first site that "
            "joins, from what its trainer has loaded."
        ),
    ] = "auto",
) -> None:
    """Write a run into the recipe's bucket, which its sites then join. Settings of a run never change afterwards."""
    resolved = read_recipe(recipe, context.args)

    from composer_prime.sites.prime_rl.create import create as create_run

    typer.echo(create_run(resolved, weights, source))
