"""`composer-prime rollouts`: some of what a run's policy said and did, from the run's folder on this machine."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def rollouts(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, such as outputs/tools.")],
    site: Annotated[str | None, typer.Option(help="Only this site's.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Only those of this training step; else the last's.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many of each site.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON, one object a line.")] = False,
) -> None:
    """Show conversations with their rewards, the tools that were called and what was taught."""
    from composer_prime.config.paths import RunPaths
    from composer_prime.errors import BadInput
    from composer_prime.sites.embedded.conversations import read
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

    from composer_prime.sites.embedded.conversation_view import draw

    console = Console(width=None if sys.stdout.isatty() else 140)
    for name, each in shown:
        console.print(draw(each, name))
