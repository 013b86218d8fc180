"""`composer-prime verify`: whether a run's bucket still makes the masters it says, computed anew on this machine."""

from contextlib import closing

from composer_prime.cli.store_arg import StoreArgument, check_run
from composer_prime.visible import say


def verify(store: StoreArgument) -> None:
    """Rebuild every master from the log, bit for bit, and compare; the first thing that differs ends it with code 1."""
    check_run(store)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from composer_prime.store import open_store
    from composer_prime.sync.verifying import Verifier

    opened = open_store(store)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    try:
        with closing(Verifier(opened)) as verifier:
            run = verifier.run
            for fragment in range(len(run.fragments)):
                with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
                    task = progress.add_task(f"fragment {fragment}", total=run.terms.final_version)
                    report = verifier.check(fragment, lambda version: progress.update(task, completed=version))  # noqa: B023
                say(report)
            state = "closed" if verifier.is_closed else "not closed yet"
        say(f"ok: run {run.manifest.run}, {state}; its masters are what its log makes on this machine")
    finally:
        opened.close()
