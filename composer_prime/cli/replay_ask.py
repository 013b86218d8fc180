"""`composer-prime replay ask`: teachers that only write text say what they would have done in stored traces."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from composer_prime.visible import say

if TYPE_CHECKING:
    from composer_prime.config.text_teachers import TextTeacher
    from composer_prime.traces.ask.plan import Plan
    from composer_prime.traces.states import States

SHOWN = 1600
"""Characters of a request that are shown, half of them from its end: a screen."""


def register(app: typer.Typer) -> None:
    """Add the command to its group."""
    app.command("ask")(ask)


def ask(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Traces, as replay ingest has stored them.")],
    teachers: Annotated[Path, typer.Option(help="A TOML file with [[teachers]]: servers, models, prices.")],
    to: Annotated[Path, typer.Option("--to", metavar="ANSWERS", help="A folder, new or of an earlier run.")],
    ceiling_usd: Annotated[float, typer.Option(help="Dollars that all runs with this folder never exceed together.")],
    only: Annotated[
        str | None, typer.Option(metavar="tool=NAME", help="Only where the author called this tool.")
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Leave longer decision points out.")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Draw so many decision points.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of --sample.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many of those that are left.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="The recipe's: count what is longer.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The policy, whose tokenizer counts: a folder or a Hugging Face id.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it will cost, and send nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Send to servers of others without showing a request.")] = False,
) -> None:
    """Ask text teachers at each decision point, cheap ones first. Given again, the command goes on where it was.

    Exit code 1: some questions have no answer, because a teacher dropped out or the ceiling was reached.
    """
    from composer_prime.config.text_teachers import load_text_teachers
    from composer_prime.errors import BadInput
    from composer_prime.private import keep_private
    from composer_prime.traces.ask.plan import Choice, make_plan
    from composer_prime.traces.ask.report import forecast
    from composer_prime.traces.ingest.store import TraceStore

    if only is not None and not only.startswith("tool="):
        raise BadInput(f'--only ({only}) must be "tool=NAME": name the tool that the author called')
    pool = load_text_teachers(teachers)
    source = TraceStore(store)
    choice = Choice(only and only.removeprefix("tool="), max_prompt_tokens, sample, seed, limit)
    plan = make_plan(source, choice, model)
    if seq_len is not None:
        say(plan.too_long(seq_len))
    if dry_run:
        for line in forecast(plan, pool, to).lines():
            say(line)
        return
    keep_private()
    if not _ask(source, plan, pool, to, ceiling_usd, yes):
        raise typer.Exit(1)


def _agreed(yes: bool, hosts: Sequence[str], request: str) -> bool:
    """Show what goes to other people's servers, for one decision point, and ask whether it may."""
    from composer_prime.errors import BadInput

    if yes:
        return True
    if not sys.stdin.isatty():
        raise BadInput(f"nobody is there to say whether traces may go to {', '.join(hosts)}: say --yes")
    if len(request) > SHOWN:
        left_out = f"\n[... {len(request) - SHOWN} characters more ...]\n"
        request = request[: SHOWN // 2] + left_out + request[-SHOWN // 2 :]
    for line in request.split("\n"):
        say(line)
    return typer.confirm(f"Requests like this one, without known secrets, go to {', '.join(hosts)}. Send them?")


def _ask(store: "States", plan: "Plan", pool: "Sequence[TextTeacher]", to: Path, ceiling_usd: float, yes: bool) -> bool:
    """Ask under a progress bar, and print the report; whether all was answered."""
    import asyncio
    from contextlib import ExitStack

    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TextColumn, TimeRemainingColumn

    from composer_prime.traces.ask.asking import ask as ask_teachers

    columns = (*Bar.get_default_columns()[:-1], TimeRemainingColumn(), TextColumn("${task.fields[usd]:.4f}"))
    bar = Bar(*columns, console=Console(stderr=True))
    task = bar.add_task("decision points", total=len(plan.points), usd=0.0)
    with ExitStack() as stack:

        def show(num_done: int, committed_usd: float) -> None:
            if not num_done:  # what is refused before has no bar
                stack.enter_context(bar)
            bar.update(task, completed=num_done, usd=committed_usd)

        agree = partial(_agreed, yes)
        found = asyncio.run(ask_teachers(store, plan, pool, to, ceiling_usd, progress=show, agree=agree))
    for line in found.lines():
        say(line)
    return found.is_complete
