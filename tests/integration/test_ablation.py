"""A real ablation, as small as one can be: arms that are trained and judged by processes, and one that fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.metrics import read_tape
from tests.integration.local_runs import REPOSITORY
from tests.patience import PATIENCE_S
from tests.servers.fake_teacher import FakeTeacher, serving_teacher
from tests.sites.tiny_folder import save_random_tiny

DEAF = """placebo 'replay.teachers=[{name="big",base_url="http://127.0.0.1:9"}]'"""
"""In place of our arm of that name."""


def ablate(output_dir: Path, teacher: str, *further: str) -> str:
    """What `composer-prime ablate` prints about a taught site that stands still, and a deaf arm."""
    command = [
        str(Path(sys.executable).with_name("composer-prime")),
        "ablate",
        str(REPOSITORY / "recipes/local/one_site.toml"),
        *("--arm", DEAF, "--seeds", "1", "--held-out-prompts", "16", *further),
        *("--replay.teachers", f'[{{name="told",base_url="{teacher}"}}]', "--model.name", str(output_dir / "model")),
        *("--max_steps", "2", "--trainer.optim.lr", "0.0", "--orchestrator.train.filter_zero_advantages", "false"),
        *("--orchestrator.batch_size", "4", "--orchestrator.group_size", "4"),
        *("--output_dir", str(output_dir)),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "placebo seed 0 failed: teacher big can't be used" in ended.stdout
    return ended.stdout


@pytest.mark.slow
def test_arms_are_trained_judged_and_reported_once_and_one_that_fails_is_tried_again(tmp_path: Path) -> None:
    save_random_tiny(tmp_path / "model")
    with serving_teacher(FakeTeacher()) as teacher:
        said = ablate(tmp_path, teacher)
    assert said.startswith("left out: wrong-hint: the recipe has no hints\n")
    folder = tmp_path / "one-site-ablation"
    report = json.loads((folder / "report.json").read_text())
    rows = {row["arm"]: row for row in report["rows"]}
    assert list(rows) == ["base", "+replay", "weak-teacher", "permuted", "restart"]
    for name, row in rows.items():
        assert row["steps"] == 2 and row["rollouts"] >= 8 and row["generated_tokens"] >= row["rollouts"]
        assert row["run_s"] > row["later_steps_s"] > 0
        assert row["held_out"] == rows["base"]["start"]  # at learning rate 0 it is judged as the untrained model is
        assert name == "base" or row["unanswered_tokens"] == 0
    base = rows["base"]
    assert rows["restart"]["restarted_from"] == "base" and rows["restart"]["start"] == base["held_out"]
    for arm in ("weak-teacher", "permuted"):
        tape = read_tape(folder / f"one-site-{arm}-s0/sites/a/metrics/orchestrator.jsonl")
        assert all(step["replay/tokens"] == step["rollout/tokens"] > 0 for step in tape[:2])
    assert report["missing"] == list(report["failed"]) == ["placebo seed 0"]
    (folder / "logs" / "base-s0.log").unlink()
    assert "2 of 3 runs are done already" in ablate(tmp_path, teacher, "--no-harm")
    assert not (folder / "logs" / "base-s0.log").exists()  # no run of base was started
