"""`composer-prime replay`: agents' logs into a store, what teachers say of them, pairs, and served teachers."""

import contextlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from composer_prime.errors import BadInput
from composer_prime.private import keep_private
from composer_prime.visible import say, visible

if TYPE_CHECKING:
    from composer_prime.config.text_teachers import TextTeacher
    from composer_prime.traces.ask.plan import Plan
    from composer_prime.traces.states import States

app = typer.Typer(
    help="From traces to what teachers would have done; and servers that stand for a teacher.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
OF_SESSIONS = "original or atif"
OF_PAIRS = "trl-sft, trl-dpo, messages or openai-finetune"
FilesArgument = Annotated[list[Path], typer.Argument(metavar="FILES...", help="Logs of agents, or folders of them.")]
FormatOption = Annotated[str | None, typer.Option("--format", help="Their format; default: by each file's content.")]


@app.command("ingest")
def ingest(
    files: FilesArgument,
    to: Annotated[Path, typer.Option(metavar="STORE", help="The store's folder.")],
    format: FormatOption = None,
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tools of a harness whose logs list none, as JSON.")
    ] = None,
    system: Annotated[
        Path | None, typer.Option(metavar="FILE", help="System message of a harness whose logs have none.")
    ] = None,
    harbor: Annotated[
        Path | None,
        typer.Option(metavar="PYTHON", help="Has Harbor, which converts what --format names to ATIF first."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a file.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and count only.")] = False,
) -> None:
    """Read sessions of agents into a store, without secrets. What is there already is not added again."""
    from rich.console import Console
    from rich.progress import track

    from composer_prime.traces.ingest.intake import Given, find_files
    from composer_prime.traces.ingest.intake import ingest as read_in
    from composer_prime.traces.ingest.report import show
    from composer_prime.traces.ingest.store import TraceStore

    keep_private()
    found, given = find_files(files), Given.of(tools, system)
    store = TraceStore(to, is_new=not dry_run) if not dry_run or to.exists() else None
    reports = read_in(found, store, named=set(files), format=format, given=given, harbor_python=harbor, dry_run=dry_run)
    progress = Console(stderr=True)
    shown = track(reports, "ingesting", total=len(found), console=progress, transient=True, disable=len(found) < 2)
    done = []
    for report in shown:
        done.append(report)
        if as_json:
            typer.echo(json.dumps(report.to_json()))
    if not as_json:
        show(done, Console(), dry_run=dry_run)
    if not any(report.format for report in done):
        raise BadInput(f"nothing was read: none of {len(found):,} files is a log of a known format (docs/traces.md)")


@app.command("export")
def export(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A store that `replay ingest` made.")],
    to: Annotated[Path, typer.Option(help="A new folder.")],
    kind: Annotated[str, typer.Option("--as", help=f"{OF_SESSIONS}; with --pairs {OF_PAIRS}.")],
    pairs: Annotated[Path | None, typer.Option(metavar="PAIRS", help="What `replay pairs` wrote of the store.")] = None,
) -> None:
    """Write a store's sessions as files, or what teachers agree on there as a dataset."""
    from composer_prime.traces.ingest.export import KINDS
    from composer_prime.traces.ingest.export import export as write
    from composer_prime.traces.ingest.store import TraceStore
    from composer_prime.traces.pairs import datasets
    from composer_prime.traces.pairs.lessons import read_lessons

    if kind not in (*KINDS, *datasets.KINDS):
        raise BadInput(f"traces can't be exported as {kind!r}: give {OF_SESSIONS}, or with --pairs {OF_PAIRS}")
    if (pairs is None) is (kind in datasets.KINDS):
        raise BadInput(f"--pairs is for {OF_PAIRS}, and --as is {kind}: give both, or neither")
    if pairs is None:
        say(f"wrote {write(TraceStore(store), to, kind)} files to {to}")
    else:
        num_rows = datasets.write_dataset(read_lessons(TraceStore(store), pairs), to, kind)
        say(f"wrote {num_rows} rows to {to}/train.jsonl")


SHOWN = 1600
"""Characters of a request that are shown, half of them from its end: a screen."""


@app.command("ask")
def ask(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Traces, as replay ingest has stored them.")],
    teachers: Annotated[Path, typer.Option(help="A TOML file with [[teachers]]: servers, models, prices.")],
    to: Annotated[Path, typer.Option(metavar="ANSWERS", help="A folder, new or of an earlier run.")],
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

    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TextColumn, TimeRemainingColumn

    from composer_prime.traces.ask.asking import ask as ask_teachers

    columns = (*Bar.get_default_columns()[:-1], TimeRemainingColumn(), TextColumn("${task.fields[usd]:.4f}"))
    bar = Bar(*columns, console=Console(stderr=True))
    task = bar.add_task("decision points", total=len(plan.points), usd=0.0)
    with contextlib.ExitStack() as stack:

        def show(num_done: int, committed_usd: float) -> None:
            if not num_done:  # what is refused before has no bar
                stack.enter_context(bar)
            bar.update(task, completed=num_done, usd=committed_usd)

        agree = partial(_agreed, yes)
        found = asyncio.run(ask_teachers(store, plan, pool, to, ceiling_usd, progress=show, agree=agree))
    for line in found.lines():
        say(line)
    return found.is_complete


@app.command("pairs")
def pairs(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="The traces, as `replay ingest` stored them.")],
    answers: Annotated[Path, typer.Argument(metavar="ANSWERS", help="The teachers' answers to them, by `replay ask`.")],
    to: Annotated[Path, typer.Option(metavar="PAIRS", help="The file to write, JSON lines.")],
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

    from composer_prime.traces.ask.folder import AnswerFolder
    from composer_prime.traces.ingest.store import TraceStore
    from composer_prime.traces.pairs.arguments import EXPLAINING
    from composer_prime.traces.pairs.families import Circularity
    from composer_prime.traces.pairs.making import make_pairs
    from composer_prime.traces.pairs.votes import Rules

    for one in ignore or ():
        if not all(one.rpartition(".")):
            raise BadInput(f"--ignore {one} must be TOOL.ARGUMENT, or *.ARGUMENT for every tool")
    rules = Rules(vote, min_support, min_votes, Circularity(student_model), EXPLAINING.union(ignore or ()))
    found = AnswerFolder(answers).answers()
    with Console(stderr=True).status("counting votes"):
        report = make_pairs(TraceStore(store), found, rules, to=None if dry_run else to)
    for line in report.lines():
        typer.echo(visible(line))


PortOption = Annotated[int, typer.Option("--port", min=1, max=65535, help="Loopback port to listen on.")]


@app.command("serve")
def serve(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Traces with token ids: .jsonl, or .jsonl.zst.")],
    port: PortOption,
    model: Annotated[str, typer.Option(help="The name to serve them under.")] = "replay",
) -> None:
    """Answer PRIME-RL's `sft` source with the tokens that a teacher wrote, until Ctrl-C."""
    from composer_prime.sites.embedded.ports import HOST, listen
    from composer_prime.traces.serve import Library, serve_library
    from composer_prime.traces.turns import read_turns

    with listen(port, "--port") as listener:
        library = Library(read_turns(file))
        typer.echo(f"{library.num_turns} turns for {library.num_prompts} prompts, as {model} on http://{HOST}:{port}")
        with contextlib.suppress(KeyboardInterrupt):
            serve_library(library, model, listener)


@app.command("teacher")
def teacher(
    model: Annotated[str, typer.Argument(metavar="MODEL", help='A folder, a Hugging Face id, or "tiny".')],
    port: PortOption,
    weights: Annotated[
        Path | None, typer.Option(help="A folder of safetensors in place of MODEL's own, such as a run's broadcast.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of a model that is made here; the run's own is its first policy.")
    ] = 0,
    max_model_len: Annotated[int, typer.Option(min=2, help="Tokens of the longest sequence, and one more.")] = 4096,
    device: Annotated[str, typer.Option(help="Where it is, as site.device: cpu, cuda or mps.")] = "cpu",
    permuted: Annotated[
        bool, typer.Option("--permuted", help="Its logits permuted over the vocabulary: a control.")
    ] = False,
) -> None:
    """Serve a model on this machine as a teacher for `[[replay.teachers]]`, until Ctrl-C."""
    from composer_prime.sites.embedded.ports import HOST, listen

    with listen(port, "--port") as listener:
        from composer_prime.config.paths import models_cache
        from composer_prime.sites.embedded.inference.serve import serve_teacher
        from composer_prime.sites.embedded.model import resolve_model

        folder = resolve_model(model, seed, models_cache(), device=device)
        typer.echo(f"teacher {model} on http://{HOST}:{port}")
        with contextlib.suppress(KeyboardInterrupt):
            serve_teacher(
                folder,
                model,
                listener,
                max_model_len=max_model_len,
                weights=weights,
                device=device,
                is_permuted=permuted,
            )
