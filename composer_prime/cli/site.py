"""`composer-prime site`: one site of a recipe, which meets the others in the recipe's bucket."""

from typing import Annotated

import typer

from composer_prime.cli.recipe_args import DryRunOption, RecipeArgument, ResumeOption, check_dry_run, read_recipe


def site(
    context: typer.Context,
    recipe: RecipeArgument,
    site: Annotated[
        str | None, typer.Option("--site", "--name", help="The site's name; default: the recipe's site.name.")
    ] = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train one site: join the recipe's run, or create it, contribute, and end with the others."""
    from composer_prime.config import PrimeRecipe
    from composer_prime.private import keep_private
    from composer_prime.store.keys import check_site_name

    keep_private()
    resolved = read_recipe(recipe, context.args)
    name = check_site_name(resolved.site.name if site is None else site)
    if isinstance(resolved, PrimeRecipe):
        from composer_prime.sites.prime_rl.launch import run_site as run_prime_rl

        raise typer.Exit(run_prime_rl(resolved, name, resume, dry_run=dry_run))
    check_dry_run(dry_run)

    from composer_prime.sites.embedded.local_run import run_site

    raise typer.Exit(run_site(resolved, name, resume))
