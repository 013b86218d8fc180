"""`composer-prime verify`: whether a run's bucket still makes the masters it says, computed anew on this machine."""

import sys

import typer

from composer_prime.cli.store_arg import StoreArgument


def verify(store: StoreArgument) -> None:
    """Rebuild every master from the log, bit for bit, and compare; the first thing that differs ends it with code 1."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from composer_prime.store import open_store
    from composer_prime.sync.verifying import Verifier

    opened = open_store(store)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    try:
        verifier = Verifier(opened, lambda fragment, version: progress.update(task, completed=version))
        run = verifier.run
        task = progress.add_task("", total=run.terms.final_version)
        try:
            with progress:
                for fragment in range(len(run.fragments)):
                    progress.reset(task, description=f"fragment {fragment} of {len(run.fragments)}")
                    report = verifier.check(fragment)
                    progress.console.file.flush()
                    typer.echo(str(report))
        finally:
            verifier.close()
        state = "closed" if verifier.is_closed else "not closed yet"
        typer.echo(f"ok: run {run.manifest.run}, {state}; its masters are what its log makes on this machine")
    finally:
        opened.close()
