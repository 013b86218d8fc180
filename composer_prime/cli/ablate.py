"""`composer-prime ablate`: what each teacher signal of a recipe, or any other change, brings over several seeds."""

import sys
from typing import Annotated

import typer

from composer_prime.cli.options import RecipeArgument, read_recipe

PLAIN_WIDTH = 140
"""Columns where the output is no terminal."""


def ablate(
    context: typer.Context,
    recipe: RecipeArgument,
    arm: Annotated[
        list[str] | None,
        typer.Option(help='A further arm, quoted: "NAME KEY=VALUE ...", such as "slow trainer.optim.lr=1e-5".'),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm, with seeds from run.seed on.")] = 3,
    held_out_prompts: Annotated[int, typer.Option(min=1, help="Tasks that no run trains on, tried once each.")] = 256,
    usd_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of this machine; without it dollars are left out.")
    ] = None,
    harm: Annotated[
        bool,
        typer.Option(
            "--harm/--no-harm", help="Arms that look for harm: placebo, wrong-hint, weak-teacher, permuted, restart."
        ),
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs with predicted time and cost, and make none.")
    ] = False,
) -> None:
    """Train base, +hint, +replay, full, arms that look for harm and further ones over several seeds, judge them on
    held-out tasks, and report.

    Runs that are done are kept: the same command goes on where it was stopped. The report is
    <output_dir>/<run.name>-ablation/report.md.
    """
    from rich.console import Console

    from composer_prime.ablate.plan import plan_jobs
    from composer_prime.config.ablate import read_arms

    read_recipe(recipe, context.args)
    jobs = plan_jobs(read_arms(recipe, context.args, arm or (), harm=harm), seeds, held_out_prompts)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)

    from composer_prime.ablate.ablation import ablate
    from composer_prime.ablate.ablation import dry_run as print_plan
    from composer_prime.ablate.runner import check_tasks, run_job
    from composer_prime.sites.embedded.installed import check_device
    from composer_prime.sites.embedded.processes import catch_interrupt

    for job in jobs:
        check_device(job.recipe.site.device)
    check_tasks(jobs)
    if dry_run:
        print_plan(jobs, console, usd_per_hour=usd_per_hour)
        return
    with catch_interrupt() as interrupt:
        code = ablate(jobs, run_job, console, usd_per_hour=usd_per_hour, is_stopped=lambda: interrupt.is_set)
    raise typer.Exit(code)
