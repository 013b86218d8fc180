"""`composer-prime create | run | site`, and `replica` and `supervise`, which jobs of a launch run."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from composer_prime.cli.options import DryRunOption, RecipeArgument, ResumeOption, StoreArgument, read_recipe
from composer_prime.errors import BadInput
from composer_prime.private import keep_private
from composer_prime.visible import say

if TYPE_CHECKING:
    from composer_prime.config import PrimeRecipe, Recipe


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


def run(
    context: typer.Context, recipe: RecipeArgument, resume: ResumeOption = False, dry_run: DryRunOption = False
) -> None:
    """Train: start every site of the recipe on this machine and watch them until they are done."""
    _train(read_recipe(recipe, context.args), None, resume, dry_run)


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
    from composer_prime.store.keys import check_site_name

    resolved = read_recipe(recipe, context.args)
    _train(resolved, check_site_name(resolved.site.name if site is None else site), resume, dry_run)


def _train(recipe: "Recipe | PrimeRecipe", site: str | None, resume: bool, dry_run: bool = False) -> None:
    """Train one site of the recipe, or all on this machine where none is named, and end with their exit code."""
    from composer_prime.config import PrimeRecipe

    keep_private()
    if isinstance(recipe, PrimeRecipe):
        from composer_prime.sites.prime_rl.launch import run_local, run_site

        if site is None:
            raise typer.Exit(run_local(recipe, resume, dry_run=dry_run))
        raise typer.Exit(run_site(recipe, site, resume, dry_run=dry_run))
    if dry_run:
        raise BadInput(
            '--dry-run checks a PRIME-RL configuration, and this recipe\'s site.backend is "embedded": see what it '
            "means with `composer-prime plan`"
        )
    from composer_prime.sites.embedded.local_run import run_local, run_site

    raise typer.Exit(run_local(recipe, resume) if site is None else run_site(recipe, site, resume))


def supervise(
    store: StoreArgument,
    launch: Annotated[int, typer.Option(min=1, help="The launch's number.")],
    attempt: Annotated[int, typer.Option(min=1, help="How often it was started.")],
    order: Annotated[str, typer.Option(metavar="SHA256", help="Of what it is to do.")],
) -> None:
    """Watch a launch as a job of its own: what `launch --supervise-on` starts."""
    from composer_prime.launch.redacting import redact_output
    from composer_prime.launch.supervisor_job import supervise as watch

    redact_output()
    raise typer.Exit(watch(store, launch, attempt, order, say))


def replica(
    store: StoreArgument,
    launch: Annotated[int, typer.Option(min=1, help="The launch's number.")],
    site: Annotated[str, typer.Option(help="The replica's name.")],
    attempt: Annotated[int, typer.Option(min=1, help="How often it was started.")],
    recipe: Annotated[str, typer.Option(metavar="SHA256", help="Of the one recipe that it may run.")],
    smoke: Annotated[bool, typer.Option("--smoke", help="Only look whether it would find what it needs.")] = False,
) -> None:
    """Run one site: its recipe is the one in the bucket with that hash, and local checkpoints are continued."""
    from composer_prime.config import RunPaths
    from composer_prime.launch.records import read_order
    from composer_prime.launch.redacting import redact_output

    keep_private()
    redact_output()
    order = read_order(store, launch, site, attempt, recipe)
    if smoke:
        from composer_prime.volunteers.doctor import examine_job, lines

        diagnosis = examine_job(order, store)
        for line in lines(diagnosis):
            say(line)
        raise typer.Exit(0 if diagnosis.is_able else 2)
    root = RunPaths.of(order).site(site).root
    _train(order, site, root.exists() and any(root.iterdir()))
