"""`composer-prime status | verify | rollouts`: what a run is doing and did, from its bucket or its folder."""

import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from composer_prime.cli.options import StoreArgument, check_run
from composer_prime.errors import BadInput
from composer_prime.visible import json_text, say


def status(
    store: StoreArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    watch_s: Annotated[
        float, typer.Option(min=0, help="Look twice, so many seconds apart, to tell who is alive.")
    ] = 0.0,
) -> None:
    """Show a run's sites, rounds, tokens and bytes. Reads only; works while sites run and after they ended."""
    from composer_prime.store import open_store
    from composer_prime.watch.status import look

    with closing(open_store(store)) as opened:
        found = look(opened, watch_s)
    if as_json:
        typer.echo(json_text(asdict(found), indent=2))
        return
    from rich.console import Console

    from composer_prime.watch.tables import draw

    draw(found, Console(width=None if sys.stdout.isatty() else 160))


def verify(store: StoreArgument) -> None:
    """Rebuild every master from the log, bit for bit, and compare; the first thing that differs ends it with code 1."""
    check_run(store)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from composer_prime.store import open_store
    from composer_prime.sync.verifying import Verifier

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with closing(open_store(store)) as opened, closing(Verifier(opened)) as verifier:
        run = verifier.run
        for fragment in range(len(run.fragments)):
            with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
                task = progress.add_task(f"fragment {fragment}", total=run.terms.final_version)
                report = verifier.check(fragment, lambda version: progress.update(task, completed=version))  # noqa: B023
            say(report)
        state = "closed" if verifier.is_closed else "not closed yet"
    say(f"ok: run {run.manifest.run}, {state}; its masters are what its log makes on this machine")


def rollouts(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, such as outputs/tools.")],
    site: Annotated[str | None, typer.Option(help="Only this site's.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Only those of this training step; else the last's.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many of each site.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON, one object a line.")] = False,
) -> None:
    """Show conversations with their rewards, the tools that were called and what was taught."""
    from composer_prime.config.paths import RunPaths
    from composer_prime.sites.embedded.conversations import draw, read
    from composer_prime.visible import json_text

    paths = RunPaths(run)
    names = sorted(folder.name for folder in paths.sites.glob("*/")) if site is None else [site]
    found = {name: read(paths.site(name).conversations) for name in names}
    shown = [
        (name, each)
        for name, all_of in found.items()
        for each in [one for one in all_of if one.step == (all_of[-1].step if step is None else step)][:limit]
    ]
    if not shown:
        which = "" if step is None else f" of step {step}"
        raise BadInput(f"{run} holds no conversations{which}: name the folder of a run that has played some")
    if as_json:
        for name, each in shown:
            typer.echo(json_text({"site": name, **asdict(each)}))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    for name, each in shown:
        console.print(draw(each, name))
