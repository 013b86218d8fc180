"""What docs/benchmarks.md says `bench link` measured, against the bytes that `plan` counts today: within 10 %."""

import re

import pytest

from tests.architecture import REPOSITORY
from tests.bench.link.link import Cell

SECTION = (REPOSITORY / "docs" / "benchmarks.md").read_text().partition("\n## Slow links\n")[2].partition("\n## ")[0]
ROWS = [line.strip("|").split("|") for line in SECTION.partition("| codec | MB sent |")[2].splitlines()[2:7]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_bytes_that_a_site_sends_and_fetches_are_as_counted(row: list[str]) -> None:
    found = Cell(50, row[0].strip(), 128, 31).traffic()
    for nbytes, cell in zip((found.up_bytes, found.down_bytes), row[1:3], strict=True):
        measured, told = (float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell))
        assert round(nbytes / 1e6, 2 if told < 10 else 1) == told, "the page tells what plan says today"
        assert nbytes / 1e6 == pytest.approx(measured, rel=0.1)
