"""What README.md and docs/ tell to type: commands, options, tests and links that there are."""

import re
from typing import Any

import pytest
import typer

from composer_prime.cli.main import app
from composer_prime.config.recipe import Recipe
from tests.architecture import REPOSITORY
from tests.bench.__main__ import app as benches

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
COMMANDS: Any = typer.main.get_command(app)
BENCHES: Any = typer.main.get_command(benches)
COMMAND = re.compile(r"\bcomposer-prime +([a-z].*)|python -m (tests\.bench [a-z].*)")
SENTENCE = re.compile(r"(?:sets|doesn't|speaks|runs|needs)\b")
"""How a sentence goes on after our name; else a command does."""


def told(page: str) -> list[str]:
    """Every command line of ours, and of the checkout's benches as "tests.bench ...", in a page's code."""
    code = re.findall(r"```\w*\n(.*?)```|`([^`\n]+)`", page.replace("\\\n", " "), flags=re.DOTALL)
    lines = [line for blocks in code for block in blocks for line in block.splitlines()]
    found = [
        re.search(r"\bcomposer-prime +([a-z].*)|python -m (tests\.bench [a-z].*)", line.partition(" #")[0])
        for line in lines
    ]
    lines = [match[1] or match[2] for match in found if match]
    return [line for line in lines if not SENTENCE.match(line)]


def command_of(line: str) -> Any:
    """The command that a line calls, below its group if it has one; None where there is none."""
    command, words = COMMANDS, line.split()
    if words[0] == "tests.bench":
        command, words = BENCHES, words[1:]
    for word in words:
        if not hasattr(command, "commands"):
            break
        command = command.commands.get(word)
    return command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_that_a_page_tells_is_there(page) -> None:
    for line in told(page.read_text()):
        command = command_of(line)
        assert command is not None, f"no such command: {line}"
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        if any(parameter.name == "recipe" for parameter in command.params):
            known |= {f"--{key}" for key in Recipe.model_fields}  # as those with a point or an underscore are
        used = [name for name in re.findall(r"(?<=\s)--[a-z][\w.-]*", line) if not re.search(r"[._]", name)]
        assert set(used) <= known, line


def test_a_command_or_an_option_that_is_not_there_would_be_found() -> None:
    (line, other) = told("`python -m tests.bench storm --sights 3`\n```bash\ncomposer-prime bench wind   # no\n```")
    assert command_of(line) is BENCHES.commands["storm"]
    assert command_of(other) is None
    assert sum(len(told(page.read_text())) for page in PAGES) > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_and_page_that_a_page_names_is_there(page) -> None:
    text = page.read_text()
    for path in re.findall(r"\btests/[\w/*]+(?:\.py)?", text):
        assert list(REPOSITORY.glob(path.rstrip("/"))), path
    for path in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / path).exists(), path
