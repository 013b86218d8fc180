"""What the pages and the messages say to install can be had: there is no release of ours on an index."""

import re
import tomllib
from pathlib import Path

from composer_prime.errors import INSTALL
from composer_prime.executors.open import PLATFORMS
from tests.architecture import REPOSITORY

PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "Makefile", "docs/*.md", "recipes/**/*.*"]
PAGES += ["infra/**/*.*", "infra/**/Dockerfile", "envs/*/README.md", "composer_prime/**/*.py"]
COMMAND = re.compile(r"pip (?:install|wheel) ([^\n`;#&]*)")
READERS_OWN = {"./shop", "./composer-prime", "./envs/ENVIRONMENT", "./envs/{module}"}
"""Folders that stand for others, or that the page has the reader make."""
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def commands() -> dict[str, list[str]]:
    """What each `pip install` and `pip wheel` names, options too, by file and command."""
    files: set[Path] = {path for pattern in PAGES for path in REPOSITORY.glob(pattern) if path.suffix != ".pyc"}
    texts = {file: file.read_text().replace("\\\n", " ") for file in files}
    found = {f"{file}: {each[0]}": each[1] for file, text in texts.items() for each in COMMAND.finditer(text)}
    return {where: [word.strip("'\":,()") for word in rest.split()] for where, rest in found.items()}


def projects() -> set[str]:
    files = [REPOSITORY / "pyproject.toml", *REPOSITORY.glob("envs/*/pyproject.toml")]
    return {tomllib.loads(file.read_text())["project"]["name"] for file in files}


def test_nothing_of_ours_is_installed_by_its_name_alone() -> None:
    ours, found = projects(), commands()
    assert len(found) > 20 and {"composer-prime", "reverse-letters"} <= ours
    for where, words in found.items():
        names = {re.split(r"[\[=<>~!]", word)[0].replace("_", "-").lower() for word in words}
        assert not names & ours, where


def test_every_folder_and_extra_that_is_installed_is_there() -> None:
    named = {word: where for where, words in commands().items() for word in words if word.startswith(".")}
    assert {".[ssh]", ".[modal]", ".[hf]", ".[aws]", ".[torchft]"} <= set(named)
    for word, where in named.items():
        folder, _, extra = word.rstrip("]").replace("./composer-prime/", "./").partition("[")
        assert folder in READERS_OWN or (REPOSITORY / folder / "pyproject.toml").exists(), where
        assert not extra or extra == "{}" or extra in EXTRAS, where


def test_every_extra_that_a_message_names_is_there() -> None:
    sources = "".join(path.read_text() for path in (REPOSITORY / "composer_prime").rglob("*.py"))
    told = set(re.findall(r"INSTALL\.format\('(\w+)'\)", sources))
    assert {"aws", "hf", "torchft"} == told and INSTALL.format("hf").endswith("pip install -e '.[hf]'")
    assert {each.extra for each in PLATFORMS.values()} - {""} <= set(EXTRAS) and told <= set(EXTRAS)
