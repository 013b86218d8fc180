"""A pytest plugin: what ran against a PRIME-RL checkout goes into the table of docs/prime-rl.md, a column a version.

make test-prime-rl PRIME_RL_SRC=<checkout> PRIME_RL_NAME=v0.8.0
"""

import importlib
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs/prime-rl.md"
BEGIN, END = "<!-- what ran, written by tests/sites/prime_rl/what_ran.py -->\n", "<!-- end of what ran -->"
OUTCOMES = ("passed", "failed", "error", "skipped")

Table = dict[str, dict[str, str]]
"""What became of a file's tests, by file and version."""


def read(page: str) -> Table:
    """The table in the page."""
    head, _, *rows = page.partition(BEGIN)[2].partition(END)[0].strip().split("\n")
    _, *versions = cells(head)
    return {link.split("`")[1]: dict(zip(versions, found, strict=True)) for link, _, *found in map(cells, rows)}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def write(page: str, table: Table) -> str:
    """The page with this table."""
    versions = list(dict.fromkeys(version for row in table.values() for version in row))
    lines = [["tests", "what is shown", *versions], ["---"] * (len(versions) + 2)]
    for file, row in sorted(table.items()):
        lines.append([f"`{file}`", title(file), *(row.get(version, "not run") for version in versions)])
    before, _, rest = page.partition(BEGIN)
    drawn = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return before + BEGIN + drawn + END + rest.partition(END)[2]


def title(file: str) -> str:
    """What the file says of itself, to its first stop."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    return (module.__doc__ or "").split("\n")[0].split(". ")[0].split(": ")[0].split("; ")[0].rstrip(".")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the column of the version that was tested, where it has a name."""
    if name := os.environ.get("PRIME_RL_NAME"):
        counted: dict[str, Counter[str]] = defaultdict(Counter)
        for outcome in OUTCOMES:
            for report in terminalreporter.getreports(outcome):
                counted[report.nodeid.split("::")[0]][outcome] += 1
        page = PAGE.read_text()
        table = {file: row | {name: "not run"} for file, row in read(page).items()}
        for file, found in counted.items():
            told = ", ".join(f"{found[outcome]} {outcome}" for outcome in OUTCOMES if found[outcome])
            table[file] = table.get(file, {}) | {name: told}
        PAGE.write_text(write(page, table))
