"""`composer-prime replay ask`: teachers that only write text say what they would have done in stored traces."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from composer_prime.visible import say

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from composer_prime.config.text_teachers import TextTeacher
    from composer_prime.traces.ask.asking import Gate
    from composer_prime.traces.states import TraceState


def register(app: typer.Typer) -> None:
    """Add the command to its group."""
    app.command("ask")(ask)


def ask(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Traces, as replay ingest has stored them.")],
    teachers: Annotated[Path, typer.Option(help="A TOML file with [[teachers]]: servers, models, prices.")],
    to: Annotated[Path, typer.Option("--to", metavar="ANSWERS", help="A folder, new or of an earlier run.")],
    ceiling_usd: Annotated[float, typer.Option(help="Dollars that all runs with this folder never exceed together.")],
    student: Annotated[
        str | None, typer.Option(metavar="URL", help="A server of the policy: where it is sure, nobody is asked.")
    ] = None,
    min_entropy: Annotated[
        float | None, typer.Option(min=0.0, help="Nats a token: a student below is sure. With --student.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it will cost, and send nothing.")] = False,
) -> None:
    """Ask text teachers at each decision point, cheap ones first. Given again, the command goes on where it was.

    Exit code 1: some questions have no answer, because a teacher dropped out or the ceiling was reached.
    """
    from composer_prime.config.text_teachers import load_text_teachers
    from composer_prime.errors import BadInput
    from composer_prime.private import keep_private
    from composer_prime.traces.ask.asking import Gate
    from composer_prime.traces.ingest.store import TraceStore

    if (student is None) != (min_entropy is None):
        raise BadInput("--student and --min-entropy go together: give both, or neither")
    gate = None if student is None or min_entropy is None else Gate(student, min_entropy)
    pool = load_text_teachers(teachers)
    states = TraceStore(store).states()
    if dry_run:
        from composer_prime.traces.ask.forecast import forecast

        for line in forecast(states, pool, to).lines():
            say(line)
        return
    keep_private()
    if not _ask(states, pool, to, ceiling_usd, gate):
        raise typer.Exit(1)


def _ask(
    states: "Iterable[TraceState]", pool: "Sequence[TextTeacher]", to: Path, ceiling_usd: float, gate: "Gate | None"
) -> bool:
    """Ask under a progress bar, and print the report; whether all was answered."""
    import asyncio
    from contextlib import ExitStack

    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TextColumn, TimeRemainingColumn

    from composer_prime.traces.ask.asking import Progress
    from composer_prime.traces.ask.asking import ask as ask_teachers

    columns = (*Bar.get_default_columns()[:-1], TimeRemainingColumn(), TextColumn("${task.fields[usd]:.4f}"))
    bar = Bar(*columns, console=Console(stderr=True))
    task = bar.add_task("decision points", usd=0.0)
    with ExitStack() as stack:

        def show(now: Progress) -> None:
            if not now.num_done:  # what is refused before has no bar
                stack.enter_context(bar)
            bar.update(task, total=now.num_states, completed=now.num_done, usd=now.committed_usd)

        found = asyncio.run(ask_teachers(states, pool, to, ceiling_usd, gate=gate, progress=show))
    for line in found.lines():
        say(line)
    return found.is_complete
