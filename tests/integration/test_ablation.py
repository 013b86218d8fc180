"""A real ablation, as small as one can be: arms that are trained and judged by processes, and one that fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.ablate.plan import plan_jobs
from composer_prime.config.ablate import read_arms
from composer_prime.metrics import read_tape
from tests.ablate.arms import FakeRunner
from tests.integration.local_runs import REPOSITORY
from tests.patience import PATIENCE_S
from tests.servers.fake_teacher import FakeTeacher, serving_teacher
from tests.sites.tiny_folder import save_random_tiny

RECIPE = str(REPOSITORY / "recipes/local/one_site.toml")
DEAF = """deaf 'replay.teachers=[{name="big",base_url="http://127.0.0.1:9"}]'"""
REAL = ("base", "permuted", "restart")


def settings(output_dir: Path, teacher: str) -> list[str]:
    """A site that stands still, of a random model, and a teacher."""
    return [
        *("--replay.teachers", f'[{{name="told",base_url="{teacher}"}}]', "--output_dir", str(output_dir)),
        *("--model.name", str(output_dir / "model"), "--max_steps", "2", "--trainer.optim.lr", "0.0"),
        *("--orchestrator.batch_size", "4", "--orchestrator.group_size", "4"),
        *("--orchestrator.train.filter_zero_advantages", "false"),
    ]


def ablate(settings: list[str], *further: str) -> str:
    """What `composer-prime ablate` prints about these and a deaf arm."""
    executable = str(Path(sys.executable).with_name("composer-prime"))
    numbers = ["--seeds", "1", "--held-out-prompts", "16", *further]
    command = [executable, "ablate", RECIPE, "--arm", DEAF, *numbers, *settings]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "deaf seed 0 failed: teacher big can't be used" in ended.stdout
    return ended.stdout


@pytest.mark.slow
def test_arms_are_trained_judged_and_reported_once_and_one_that_fails_is_tried_again(tmp_path: Path) -> None:
    save_random_tiny(tmp_path / "model")
    fake = FakeRunner(lambda job: -1.0)
    with serving_teacher(FakeTeacher()) as teacher:
        taught = settings(tmp_path, teacher)
        for job in plan_jobs(read_arms(RECIPE, taught, [DEAF]), 1, 16):
            if job.arm.name not in (*REAL, "deaf"):
                fake(job, lambda: False)
        said = ablate(taught)
    assert said.startswith("left out: wrong-hint: the recipe has no hints\n3 of 7 runs are done already\n")
    folder = tmp_path / "one-site-ablation"
    report = json.loads((folder / "report.json").read_text())
    rows = {row["arm"]: row for row in report["rows"]}
    base, permuted, restart = (rows[name] for name in REAL)
    for row in (base, permuted, restart):
        assert row["steps"] == 2 and row["rollouts"] >= 8 and row["generated_tokens"] >= row["rollouts"]
        assert row["run_s"] > 0
        assert row["held_out"] == base["start"]  # at learning rate 0 it is judged as the untrained model is
    assert restart["restarted_from"] == "base" and restart["start"] == base["held_out"]
    tape = read_tape(folder / "one-site-permuted-s0/sites/a/metrics/orchestrator.jsonl")
    assert all(step["replay/tokens"] == step["rollout/tokens"] > 0 for step in tape[:2])
    assert report["missing"] == list(report["failed"]) == ["deaf seed 0"]
    (folder / "logs" / "base-s0.log").unlink()
    assert "2 of 3 runs are done already" in ablate(taught, "--no-harm")
    assert not (folder / "logs" / "base-s0.log").exists()  # no run of base was started
