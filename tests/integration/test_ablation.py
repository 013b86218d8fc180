"""A real ablation, as small as one can be: an arm that is trained and judged by processes, and one that fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.local_runs import REPOSITORY
from tests.patience import PATIENCE_S

DEAD_TEACHER = """deaf 'replay.teachers=[{name="big",base_url="http://127.0.0.1:9"}]'"""


def ablate(output_dir: Path) -> str:
    """What `composer-prime ablate` prints about one site of the tools recipe that stands still, and a deaf arm."""
    command = [
        str(Path(sys.executable).with_name("composer-prime")),
        "ablate",
        str(REPOSITORY / "recipes/local/tools.toml"),
        *("--arm", DEAD_TEACHER, "--seeds", "1", "--held-out-prompts", "16"),
        *("--sites.count", "1", "--outer=None", "--site.threads", "1", "--max_steps", "2"),
        *("--orchestrator.batch_size", "4", "--orchestrator.group_size", "4", "--trainer.optim.lr", "0.0"),
        *("--output_dir", str(output_dir)),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "deaf seed 0 failed: teacher big can't be used" in ended.stdout
    return ended.stdout


@pytest.mark.slow
def test_an_arm_is_trained_judged_and_reported_once_and_one_that_fails_is_tried_again(tmp_path: Path) -> None:
    ablate(tmp_path)
    folder = tmp_path / "tools-ablation"
    report = json.loads((folder / "report.json").read_text())
    (base,) = report["rows"]
    assert base["steps"] == 2 and base["rollouts"] >= 8 and base["generated_tokens"] >= base["rollouts"]
    assert base["run_s"] > base["later_steps_s"] > 0
    assert base["held_out"] == base["start"]  # at learning rate 0 it is judged as the untrained model is
    assert report["missing"] == list(report["failed"]) == ["deaf seed 0"]
    (folder / "logs" / "base-s0.log").unlink()
    assert "1 of 2 runs are done already" in ablate(tmp_path)
    assert not (folder / "logs" / "base-s0.log").exists()  # no run of base was started
