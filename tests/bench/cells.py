"""A bench of cells: each is measured in its turn, shown as soon as it is there, and kept as JSON where wanted."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, RenderableType

from tests.bench.link.process import ending_tidily

CellT = TypeVar("CellT")
FoundT = TypeVar("FoundT")

PIPE_WIDTH = 180
"""Columns of a table that goes to a file or a pipe."""


def measure_cells(
    cells: Sequence[CellT],
    measure: Callable[[CellT], FoundT],
    draw: Callable[[Sequence[tuple[CellT, FoundT]]], RenderableType],
    record: Callable[[CellT, FoundT], dict[str, Any]],
    json_path: Path | None,
    notes: Callable[[FoundT], Sequence[str]] = lambda found: (),
) -> Console:
    """Measure the cells, draw each one alone with its notes, and then all of them, if several. Returns the console.

    json_path   rewritten after every cell with the records so far
    """
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    results: list[tuple[CellT, FoundT]] = []
    with ending_tidily():
        for cell in cells:
            results.append((cell, measure(cell)))
            console.print(draw(results[-1:]), end="")
            for line in notes(results[-1][1]):
                console.print(f"  {line}", highlight=False)
            if json_path is not None:
                json_path.write_text(json.dumps([record(*each) for each in results], indent=1) + "\n")
    if len(results) > 1:
        console.print(draw(results))
    return console
