"""What ingestion tells a person: a table of the files, and a line for each remark."""

import os
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
    """Print the table, the remarks, and lines of sums."""
    known = [report for report in reports if report.format is not None]
    file, format = Column("file", overflow="fold", min_width=20), Column("format", overflow="fold")
    counts = [Column(name, justify="right") for name in ("points", "left out", "records", "used")]
    table = Table(file, format, *counts)
    root = os.path.commonpath([report.path.absolute().parent for report in known]) if known else ""
    for report in known[:MAX_ROWS]:
        table.add_row(Text(visible(os.path.relpath(report.path.absolute(), root))), report.format, *_cells([report]))
    if len(known) > 1:
        table.add_row(f"all {len(known):,}", "", *_cells(known))
    console.print(table)
    for what, counted in (("left out", "left_out"), ("not used", "dropped"), ("cut out", "secrets")):
        found = sum((Counter(getattr(report, counted)) for report in known), Counter[str]())
        for reason, count in found.most_common():
            say(f"{what}: {count:,} {reason}")
    remarks = Counter(remark for report in known for remark in report.remarks)
    for remark, count in remarks.items():
        first = next(report.path for report in known if remark in report.remarks)
        say(f"{count:,} files: {remark}" if count > 1 else f"{first}: {remark}")
    passed_over = [report for report in reports if report.format is None]
    for report in passed_over[:MAX_PASSED_OVER]:
        say(report.remarks[0])
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
