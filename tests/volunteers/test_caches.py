"""What a site downloads lies below the volunteer's folder, unless they have a place of their own for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.config.paths import models_cache
from composer_prime.volunteers.folder import HUB_PLACES, VolunteerFolder, cache_variables, elsewhere, kept_below

PLACES = "from huggingface_hub import constants as c; print(c.HF_HUB_CACHE, c.HF_TOKEN_PATH, sep='\\n')"


@pytest.fixture(autouse=True)
def no_place_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*HUB_PLACES, "HF_TOKEN_PATH", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def hub_places() -> list[Path]:
    """Where the hub's own client keeps weights and looks for the token, in a process that starts now."""
    done = subprocess.run([sys.executable, "-c", PLACES], capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines()]


def test_weights_and_models_go_below_the_folder_and_the_token_stays(tmp_path: Path) -> None:
    root, home = tmp_path / "run", tmp_path / "home"
    before = dict(os.environ)
    with kept_below(root):
        weights, token = hub_places()
        assert weights.is_relative_to(root) and models_cache().is_relative_to(root)
        assert token == home / ".cache" / "huggingface" / "token"
    assert dict(os.environ) == before
    assert hub_places()[0].is_relative_to(home)


def test_what_is_downloaded_counts_as_used(tmp_path: Path) -> None:
    folder = VolunteerFolder(tmp_path / "run", "alice")
    folder.make()
    with kept_below(folder.root):
        weights = hub_places()[0] / "models--some--model" / "blobs"
        weights.mkdir(parents=True)
        (weights / "one").write_bytes(bytes(1000))
    assert folder.used_bytes() == 1000


@pytest.mark.parametrize("name", HUB_PLACES)
def test_a_place_of_the_volunteer_s_own_is_kept_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root, mine = tmp_path / "run", tmp_path / "mine"
    monkeypatch.setenv(name, str(mine))
    with kept_below(root):
        assert hub_places()[0].is_relative_to(mine) and models_cache().is_relative_to(root)
    said = elsewhere(root)
    assert said is not None and f"go to {mine}, since {name} says so" in said and "--max-disk-gib doesn't count" in said


def test_nothing_is_said_where_all_lies_below_the_folder(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert elsewhere(root) is None
    assert elsewhere(root, {"HF_HOME": str(root / "mine")}) is None
    assert elsewhere(root, cache_variables(root)) is None
