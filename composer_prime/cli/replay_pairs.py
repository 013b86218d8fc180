"""`composer-prime replay pairs`: what the teachers agree on, as pairs and step scores."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    """Add the command to `composer-prime replay`."""
    app.command("pairs")(pairs)


def pairs(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="The traces, as `replay ingest` stored them.")],
    answers: Annotated[Path, typer.Argument(metavar="ANSWERS", help="The teachers' answers to them, by `replay ask`.")],
    to: Annotated[Path, typer.Option("--to", metavar="PAIRS", help="The file to write, JSON lines.")],
    vote: Annotated[
        Literal["plurality", "weighted"], typer.Option(help="One vote a teacher, or by its weight in their file.")
    ] = "plurality",
    student_model: Annotated[
        str | None, typer.Option(help="The model to train: its family counts for a quarter, and alone for nothing.")
    ] = None,
    min_support: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of the votes' weight that is a consensus.")
    ] = 0.5,
    min_votes: Annotated[int, typer.Option(min=1, help="Least number of votes for the same action.")] = 2,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="TOOL.ARGUMENT", help="An argument that only explains a call; *.ARGUMENT: of any tool."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the counts, and write no PAIRS.")] = False,
) -> None:
    """Write a pair where the teachers agree on another action than the author's, and each step's score."""
    from rich.console import Console

    from composer_prime.errors import BadInput
    from composer_prime.traces.ask.folder import AnswerFolder
    from composer_prime.traces.ingest.store import TraceStore
    from composer_prime.traces.pairs.arguments import EXPLAINING
    from composer_prime.traces.pairs.families import Circularity
    from composer_prime.traces.pairs.making import make_pairs
    from composer_prime.traces.pairs.votes import Rules
    from composer_prime.visible import visible

    for one in ignore or ():
        if not all(one.rpartition(".")):
            raise BadInput(f"--ignore {one} must be TOOL.ARGUMENT, or *.ARGUMENT for every tool")
    rules = Rules(vote, min_support, min_votes, Circularity(student_model), EXPLAINING.union(ignore or ()))
    found = AnswerFolder(answers).answers()
    with Console(stderr=True).status("counting votes"):
        report = make_pairs(TraceStore(store), found, rules, to=None if dry_run else to)
    for line in report.lines():
        typer.echo(visible(line))
