"""An upload puts the whole folder into one commit of a model repository; what fails says so in one line."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_prime.errors import ConfigError
from composer_prime.export import snapshot
from tests.architecture import REPOSITORY
from tests.export.fake_hub import FakeHub, serving_hub
from tests.export.runs import make_run
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> str:
    return make_run(tmp_path_factory.mktemp("bucket") / "run", base, rounds=1).uri


def export(hub: FakeHub, run: str, base: Path, to: str, *more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads the endpoint when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "composer_prime.cli.main", "export", run, "--to", to, "--model", str(base), *more]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


def test_the_folder_ends_in_one_commit_of_the_repository(hub, run, base, tmp_path):
    assert export(hub, run, base, str(tmp_path / "here")).returncode == 0
    done = export(hub, run, base, "hf://someone/weights", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"exported run version 2 in bfloat16 to {hub.url}/someone/weights/commit/1\n"
    (made,) = hub.made
    assert (made["organization"], made["name"]) == ("someone", "weights")
    assert made.get("private") is True or made.get("visibility") == "private"  # by huggingface_hub's version
    assert hub.messages == ["exported run version 2 in bfloat16"]
    written = {file.name: file.read_bytes() for file in (tmp_path / "here").iterdir()}
    assert hub.files == {"someone/weights": written}


def test_an_upload_that_is_refused_is_one_line(hub, run, base):
    hub.status = 403
    done = export(hub, run, base, "hf://someone/weights")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("composer-prime: hf://someone/weights didn't take the upload (") and "HF_TOKEN" in last


def test_without_the_package_the_extra_is_named_before_anything_is_made(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[hf\]'"):
        snapshot.check_installed()
