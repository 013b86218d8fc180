"""`composer-prime replica`: what a job of `composer-prime launch` runs. It needs the bucket, its name, its attempt."""

from typing import Annotated

import typer

from composer_prime.cli.store_arg import StoreArgument


def replica(
    store: StoreArgument,
    launch: Annotated[int, typer.Option("--launch", min=1, help="The launch's number.", show_default=False)],
    site: Annotated[str, typer.Option("--site", help="The replica's name.", show_default=False)],
    attempt: Annotated[int, typer.Option("--attempt", min=1, help="How often it was started.", show_default=False)],
) -> None:
    """Run one site as its launch recorded it: the recipe comes from the bucket, and local checkpoints are continued."""
    from composer_prime.config import PrimeRecipe, RunPaths
    from composer_prime.executors.redacting import redacted_output
    from composer_prime.executors.replica import read_order

    with redacted_output():
        recipe = read_order(store, launch, site, attempt)
        root = RunPaths.of(recipe).site(site).root
        resume = root.exists() and any(root.iterdir())
        if isinstance(recipe, PrimeRecipe):
            from composer_prime.sites.prime_rl.launch import run_site as run_prime_rl

            code = run_prime_rl(recipe, site, resume)
        else:
            from composer_prime.sites.embedded.local_run import run_site

            code = run_site(recipe, site, resume)
    raise typer.Exit(code)
