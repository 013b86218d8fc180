"""A real ablation, as small as one can be: two arms of the demo's recipe, trained and judged by processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.local_runs import REPOSITORY
from tests.patience import PATIENCE_S


def ablate(output_dir: Path, *arguments: str) -> str:
    """What `composer-prime ablate` prints about two arms of one site, 2 steps and 1 seed each."""
    command = [
        str(Path(sys.executable).with_name("composer-prime")),
        "ablate",
        str(REPOSITORY / "recipes/local/one_site.toml"),
        *("--arm", "still trainer.optim.lr=0.0", "--seeds", "1", "--held-out-prompts", "8"),
        *("--max_steps", "2", "--orchestrator.batch_size", "8", "--orchestrator.group_size", "4"),
        *("--output_dir", str(output_dir), *arguments),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_two_arms_are_trained_judged_and_reported_once(tmp_path: Path) -> None:
    ablate(tmp_path)
    folder = tmp_path / "one-site-ablation"
    base, still = json.loads((folder / "report.json").read_text())["rows"]
    assert (base["arm"], still["arm"]) == ("base", "still")
    assert base["steps"] == still["steps"] == 2
    for row in (base, still):
        assert row["rollouts"] >= 16 and row["generated_tokens"] >= row["rollouts"]
        assert row["run_s"] >= row["step_s"] > 0
    assert still["held_out"] == base["start"]  # an arm that doesn't learn is judged as the untrained model is
    (folder / "logs" / "base-s0.log").unlink()
    assert "2 of 2 runs are done already" in ablate(tmp_path)
    assert not (folder / "logs" / "base-s0.log").exists()  # no run was started
