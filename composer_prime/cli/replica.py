"""`composer-prime replica` and `supervise`: what jobs of `composer-prime launch` run. They need the bucket, and what
their command line says of their launch."""

from typing import Annotated

import typer

from composer_prime.cli.store_arg import StoreArgument
from composer_prime.visible import say


def supervise(
    store: StoreArgument,
    launch: Annotated[int, typer.Option("--launch", min=1, help="The launch's number.", show_default=False)],
    attempt: Annotated[int, typer.Option("--attempt", min=1, help="How often it was started.", show_default=False)],
    order: Annotated[str, typer.Option("--order", metavar="SHA256", help="Of what it is to do.", show_default=False)],
) -> None:
    """Watch a launch as a job of its own: what `launch --supervise-on` starts."""
    from composer_prime.launch.redacting import redact_output
    from composer_prime.launch.supervisor_job import supervise as watch

    redact_output()
    raise typer.Exit(watch(store, launch, attempt, order, say))


def replica(
    store: StoreArgument,
    launch: Annotated[int, typer.Option("--launch", min=1, help="The launch's number.", show_default=False)],
    site: Annotated[str, typer.Option("--site", help="The replica's name.", show_default=False)],
    attempt: Annotated[int, typer.Option("--attempt", min=1, help="How often it was started.", show_default=False)],
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="SHA256", help="Of the one recipe that it may run.", show_default=False)
    ],
    smoke: Annotated[bool, typer.Option("--smoke", help="Only look whether it would find what it needs.")] = False,
) -> None:
    """Run one site: its recipe is the one in the bucket with that hash, and local checkpoints are continued."""
    from composer_prime.config import PrimeRecipe, RunPaths
    from composer_prime.launch.records import read_order
    from composer_prime.launch.redacting import redact_output
    from composer_prime.private import keep_private

    keep_private()
    redact_output()
    order = read_order(store, launch, site, attempt, recipe)
    if smoke:
        from composer_prime.volunteers.doctor import lines
        from composer_prime.volunteers.examination import examine_job

        diagnosis = examine_job(order, store)
        for line in lines(diagnosis):
            say(line)
        raise typer.Exit(0 if diagnosis.is_able else 2)
    root = RunPaths.of(order).site(site).root
    resume = root.exists() and any(root.iterdir())
    if isinstance(order, PrimeRecipe):
        from composer_prime.sites.prime_rl.launch import run_site as run_prime_rl

        code = run_prime_rl(order, site, resume)
    else:
        from composer_prime.sites.embedded.local_run import run_site

        code = run_site(order, site, resume)
    raise typer.Exit(code)
