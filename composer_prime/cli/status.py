"""`composer-prime status`: what a run is doing, from its bucket alone."""

import sys
from typing import Annotated

import typer

from composer_prime.cli.store_arg import StoreArgument


def status(
    store: StoreArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    watch_s: Annotated[
        float, typer.Option("--watch-s", min=0, help="Look twice, so many seconds apart, to tell who is alive.")
    ] = 0.0,
) -> None:
    """Show a run's sites, rounds, tokens and bytes. Reads only; works while sites run and after they ended."""
    from dataclasses import asdict

    from composer_prime.store import open_store
    from composer_prime.visible import json_text
    from composer_prime.watch.status import look

    opened = open_store(store)
    try:
        found = look(opened, watch_s)
    finally:
        opened.close()
    if as_json:
        typer.echo(json_text(asdict(found), indent=2))
        return
    from rich.console import Console

    from composer_prime.watch.tables import draw

    draw(found, Console(width=None if sys.stdout.isatty() else 160))
