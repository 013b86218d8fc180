"""What ingestion tells a person: a table of the files, and a line for each remark."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from composer_prime.traces.ingest.intake import FileReport
from composer_prime.visible import say, visible

MAX_ROWS = 50
"""Files with a row of their own; the rest are in the last row's sums."""
MAX_PASSED_OVER = 5
"""Files of no known format that are named with the reason."""


def show(reports: Sequence[FileReport], console: Console, *, dry_run: bool) -> None:
    """Print the table, the remarks, and a line of sums."""
    known = [report for report in reports if report.format is not None]
    file = Column("file", overflow="fold", min_width=24)
    table = Table(file, "format", "sessions", "new", "states", "records", "kept", "dropped", "secrets", show_lines=True)
    for report in known[:MAX_ROWS]:
        table.add_row(Text(visible(report.path)), report.format, *_cells([report]))
    if len(known) > 1:
        table.add_row(f"all {len(known):,}", "", *_cells(known))
    console.print(table)
    passed_over = [report for report in reports if report.format is None]
    for report in [*known, *passed_over[:MAX_PASSED_OVER]]:
        for remark in report.remarks:
            say(f"{report.path}: {remark}")
    if len(passed_over) > MAX_PASSED_OVER:
        say(f"{len(passed_over) - MAX_PASSED_OVER:,} more files passed over")
    new, copies = sum(report.num_new for report in known), sum(report.num_copies for report in known)
    verb = "would be added" if dry_run else "added"
    say(f"{new:,} sessions {verb}; {copies:,} of their states are in other sessions, too, and count once")


def _cells(reports: Sequence[FileReport]) -> list[str]:
    dropped, secrets = Counter[str](), Counter[str]()
    for report in reports:
        dropped.update(report.dropped)
        secrets.update(report.secrets)
    counts = [
        sum(getattr(report, name) for report in reports)
        for name in ("num_sessions", "num_new", "num_states", "num_records", "num_used")
    ]
    return [*(f"{count:,}" for count in counts), _counted(dropped), _counted(secrets)]


def _counted(counts: Counter[str]) -> str:
    return "\n".join(f"{count:,} {reason}" for reason, count in counts.most_common()) or "0"
