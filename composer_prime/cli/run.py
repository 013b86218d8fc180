"""`composer-prime run`: all sites of a recipe, on this machine."""

import typer

from composer_prime.cli.recipe_args import DryRunOption, RecipeArgument, ResumeOption, check_dry_run, read_recipe


def run(
    context: typer.Context,
    recipe: RecipeArgument,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train: start every site of the recipe on this machine and watch them until they are done."""
    from composer_prime.config import PrimeRecipe
    from composer_prime.private import keep_private

    keep_private()
    resolved = read_recipe(recipe, context.args)
    if isinstance(resolved, PrimeRecipe):
        from composer_prime.sites.prime_rl.launch import run_local as run_prime_rl

        raise typer.Exit(run_prime_rl(resolved, resume, dry_run=dry_run))
    check_dry_run(dry_run)

    from composer_prime.sites.embedded.local_run import run_local

    raise typer.Exit(run_local(resolved, resume))
