"""`composer-prime run`: all sites of a recipe, on this machine."""

import typer

from composer_prime.cli.recipe_args import RecipeArgument, ResumeOption, read_recipe


def run(
    context: typer.Context,
    recipe: RecipeArgument,
    resume: ResumeOption = False,
) -> None:
    """Train: start every site of the recipe on this machine and watch them until they are done."""
    resolved = read_recipe(recipe, context.args)

    from composer_prime.sites.embedded.local_run import run_local

    raise typer.Exit(run_local(resolved, resume))
