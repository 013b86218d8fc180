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
"""Files that are named with the same remark, or as of no known format."""


def show(reports: Sequence[FileReport], console: Console, *, dry_run: bool) -> None:
    """Print the table, the remarks, and lines of sums."""
    known = [report for report in reports if report.format is not None]
    file, format = Column("file", overflow="fold", min_width=20), Column("format", overflow="fold")
    counts = [Column(name, justify="right") for name in ("points", "left out", "records", "used")]
    table = Table(file, format, *counts)
    for report in known[:MAX_ROWS]:
        table.add_row(Text(visible(report.path)), report.format, *_cells([report]))
    if len(known) > 1:
        table.add_row(f"all {len(known):,}", "", *_cells(known))
    console.print(table)
    for what, counted in (("left out", "left_out"), ("not used", "dropped"), ("cut out", "secrets")):
        found = sum((Counter(getattr(report, counted)) for report in known), Counter[str]())
        for reason, count in found.most_common():
            say(f"{what}: {count:,} {reason}")
    passed_over = [report for report in reports if report.format is None]
    told = Counter[str]()
    for report in [*known, *passed_over[:MAX_PASSED_OVER]]:
        for remark in report.remarks:
            told[remark] += 1
            if told[remark] <= MAX_PASSED_OVER:
                say(f"{report.path}: {remark}")
    for remark, count in told.items():
        if count > MAX_PASSED_OVER:
            say(f"{count - MAX_PASSED_OVER:,} more files: {remark}")
    if len(passed_over) > MAX_PASSED_OVER:
        say(f"{len(passed_over) - MAX_PASSED_OVER:,} more files passed over")
    sessions, new = sum(report.num_sessions for report in known), sum(report.num_new for report in known)
    copies = sum(report.num_copies for report in known)
    verb = "would be added" if dry_run else "added"
    say(f"{new:,} of {sessions:,} sessions {verb}; {copies:,} of their points are in others, too, and count once")


def _cells(reports: Sequence[FileReport]) -> list[str]:
    points, used, records = (
        sum(getattr(report, name) for report in reports) for name in ("num_states", "num_used", "num_records")
    )
    left_out = sum(sum(report.left_out.values()) for report in reports)
    share = f"{used / records:.0%}" if records else ""
    return [f"{points:,}", f"{left_out:,}", f"{records:,}", share]
