"""Checkpoints and broadcasts on a disk that takes no more: one clear line, and what was saved before stays."""

import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.sites.embedded.broadcasts import STABLE
from composer_prime.sites.embedded.checkpoints import newest_checkpoint
from composer_prime.sites.embedded.whole_folder import numbered_steps, whole_folder
from tests.patience import PATIENCE_S

FULL = """
import resource, signal, sys
from pathlib import Path

import torch

from composer_prime.errors import SiteError
from composer_prime.sites.embedded.broadcasts import publish
from composer_prime.sites.embedded.checkpoints import save_checkpoint

folder, model = Path(sys.argv[1]), torch.nn.Linear(4, 4)
save_checkpoint(folder / "checkpoints", 2, {"step": 2})
publish(model, folder / "broadcasts", 2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # a file that grows longer can't be written
large = torch.nn.Linear(300, 300)
for write in (
    lambda: save_checkpoint(folder / "checkpoints", 4, large.state_dict()),
    lambda: publish(large, folder / "broadcasts", 4),
):
    try:
        write()
    except SiteError as error:
        print(error)
"""
"""The kernel refuses writes beyond a size, as a full disk does."""


def test_a_disk_that_takes_no_more_is_named_and_what_was_saved_before_stays(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        str(tmp_path / what / "step_4") for what in ("checkpoints", "broadcasts")
    ]
    assert all("MB free on its disk: free some space" in line and "--resume" in line for line in lines)
    assert numbered_steps(tmp_path / "checkpoints") == [2] and newest_checkpoint(tmp_path / "checkpoints") == {
        "step": 2
    }
    assert numbered_steps(tmp_path / "broadcasts") == [2] and (tmp_path / "broadcasts/step_2" / STABLE).is_file()
    assert list(tmp_path.rglob(".step_*")) == []


def test_what_a_process_that_died_left_half_written_goes_with_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".step_3.99999").mkdir()
    with whole_folder(tmp_path / "step_4") as making:
        (making / "file").write_text("whole")
        assert not (tmp_path / "step_4").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step_4"]


def test_an_error_of_the_writers_own_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "step_4").mkdir()
    (tmp_path / "step_4/file").write_text("before")
    with pytest.raises(ValueError, match="its own"), whole_folder(tmp_path / "step_4") as making:
        (making / "file").write_text("after")
        raise ValueError("its own")
    assert (tmp_path / "step_4/file").read_text() == "before" and list(tmp_path.glob(".*")) == []
