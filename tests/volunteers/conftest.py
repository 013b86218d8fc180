"""What tests of volunteers start from: a run with an owner, and a machine that is able to take part in it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config.toml import to_toml
from composer_prime.volunteers import doctor
from composer_prime.volunteers.doctor import Torch
from tests.volunteers.owned_run import OWNER, OwnedRun, machine


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    """What an invitation sets in this process is gone after the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnedRun:
    made = open_run(tmp_path)
    able = machine(torch=Torch("2.13.0", made.site.run.manifest.test_vector))
    monkeypatch.setattr(doctor, "look", lambda: able)
    return made


def open_run(folder: Path, **outer: Any) -> OwnedRun:
    """A run with the files that its owner has: owner.key and recipe.toml."""
    made = OwnedRun(folder, **outer)
    OWNER.save(folder / "owner.key")
    (folder / "recipe.toml").write_text(to_toml(made.recipe.to_data()))
    return made


@pytest.fixture
def prime_rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of PRIME-RL's name on the PATH, which nothing here starts."""
    program = tmp_path / "bin" / "rl"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return program
