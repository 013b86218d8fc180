"""`composer-prime site`: one site of a recipe, which meets the others in the recipe's bucket."""

from typing import Annotated

import typer

from composer_prime.cli.recipe_args import RecipeArgument, ResumeOption, read_recipe


def site(
    context: typer.Context,
    recipe: RecipeArgument,
    site: Annotated[
        str | None, typer.Option("--site", help="The site's name; default: the recipe's site.name.")
    ] = None,
    resume: ResumeOption = False,
) -> None:
    """Train one site: join the recipe's run, or create it, contribute, and end with the others."""
    from composer_prime.store.keys import check_site_name

    resolved = read_recipe(recipe, context.args)
    name = check_site_name(resolved.site.name if site is None else site)

    from composer_prime.sites.embedded.local_run import run_site

    raise typer.Exit(run_site(resolved, name, resume))
