"""A pytest plugin: writes what ran against a PRIME-RL checkout into docs/prime-rl.md, a column for each version.

`make test-prime-rl PRIME_RL_SRC=<checkout> PRIME_RL_NAME=v0.8.0` writes that version's column anew.
"""

import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/prime-rl.md"
BEGIN, END = "<!-- what ran, written by tests/sites/prime_rl/what_ran.py -->\n", "<!-- end of what ran -->"
NOT_RUN = "not run"
OUTCOMES = ("passed", "failed", "error", "skipped")

Table = dict[tuple[str, str], dict[str, str]]
"""What became of a test, by its file and its claim, and by version."""


def read(page: str) -> Table:
    """The table in the page."""
    head, _, *rows = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    _, _, *versions = cells(head)
    return {(file, claim): dict(zip(versions, found, strict=True)) for file, claim, *found in map(cells, rows)}


def cells(line: str) -> list[str]:
    return [cell.strip(" `") for cell in line.strip("|").split("|")]


def write(page: str, table: Table) -> str:
    """The page with this table in it."""
    versions = sorted({version for row in table.values() for version in row}, key=lambda name: (name[0] != "v", name))
    lines = [["tests", "what is shown", *versions], ["---"] * (len(versions) + 2)]
    for (file, claim), row in sorted(table.items()):
        lines.append([f"`{file}`", claim, *(row.get(version, NOT_RUN) for version in versions)])
    before, _, rest = page.partition(BEGIN)
    drawn = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return before + BEGIN + drawn + END + rest.partition(END)[2]


def claim_of(nodeid: str) -> tuple[str, str]:
    """A test's file and its claim: "tests/test_x.py::test_it_is[1]" gives ("tests/test_x.py", "it is")."""
    file, _, name = nodeid.partition("::")
    return file, name.partition("[")[0].removeprefix("test_").replace("_", " ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the column of the version that PRIME_RL_NAME names; without a name, nothing."""
    if version := os.environ.get("PRIME_RL_NAME"):
        counted: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for outcome in OUTCOMES:
            for report in terminalreporter.getreports(outcome):
                if "::" in report.nodeid:  # not a whole file, left out while tests are collected
                    counted[claim_of(report.nodeid)][outcome] += 1
        page = PAGE.read_text()
        table = read(page)
        for had in table.values():
            had[version] = NOT_RUN
        for test, found in counted.items():
            told = ", ".join(f"{found[outcome]} {outcome}" for outcome in OUTCOMES if found[outcome])
            table.setdefault(test, {})[version] = told
        ran = {test: had for test, had in table.items() if set(had.values()) != {NOT_RUN}}
        PAGE.write_text(write(page, ran))
