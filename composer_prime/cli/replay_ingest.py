"""`composer-prime replay ingest` and `export`: an agent's logs into a store of traces, and out of it."""

from pathlib import Path
from typing import Annotated

import typer

OF_SESSIONS = "original or atif"
OF_PAIRS = "trl-sft, trl-dpo, messages or openai-finetune"
FilesArgument = Annotated[list[Path], typer.Argument(metavar="FILES...", help="Logs of agents, or folders of them.")]
FormatOption = Annotated[
    str | None,
    typer.Option("--format", help="Their format; default: by each file's content.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the group's."""
    app.command("ingest")(ingest)
    app.command("export")(export)


def ingest(
    files: FilesArgument,
    to: Annotated[Path, typer.Option("--to", metavar="STORE", help="The store's folder.", show_default=False)],
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
    import json

    from rich.console import Console
    from rich.progress import track

    from composer_prime.errors import BadInput
    from composer_prime.private import keep_private
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


def export(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A store that `replay ingest` made.")],
    to: Annotated[Path, typer.Option("--to", help="A new folder.", show_default=False)],
    kind: Annotated[str, typer.Option("--as", help=f"{OF_SESSIONS}; with --pairs {OF_PAIRS}.", show_default=False)],
    pairs: Annotated[Path | None, typer.Option(metavar="PAIRS", help="What `replay pairs` wrote of the store.")] = None,
) -> None:
    """Write a store's sessions as files, or what teachers agree on there as a dataset."""
    from composer_prime.errors import BadInput
    from composer_prime.traces.ingest.export import KINDS
    from composer_prime.traces.ingest.export import export as write
    from composer_prime.traces.ingest.store import TraceStore
    from composer_prime.traces.pairs import datasets
    from composer_prime.traces.pairs.lessons import read_lessons
    from composer_prime.visible import say

    if kind not in (*KINDS, *datasets.KINDS):
        raise BadInput(f"traces can't be exported as {kind!r}: give {OF_SESSIONS}, or with --pairs {OF_PAIRS}")
    if (pairs is None) is (kind in datasets.KINDS):
        raise BadInput(f"--pairs is for {OF_PAIRS}, and --as is {kind}: give both, or neither")
    if pairs is None:
        say(f"wrote {write(TraceStore(store), to, kind)} files to {to}")
    else:
        num_rows = datasets.write_dataset(read_lessons(TraceStore(store), pairs), to, kind)
        say(f"wrote {num_rows} rows to {to}/train.jsonl")
