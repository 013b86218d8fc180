"""A whole run that learns from a teacher served on this machine, started as a person would."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from composer_prime.config.paths import RunPaths
from composer_prime.metrics import read_tape
from composer_prime.sites.embedded.ports import HOST, claim_port
from tests.integration.local_runs import REPOSITORY, started, wait_until
from tests.sites.tiny_folder import save_random_tiny

EXECUTABLE = str(Path(sys.executable).with_name("composer-prime"))
NUM_STEPS = 3


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://{HOST}:{port}/health", trust_env=False).is_success
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [8, 0])
def test_a_run_with_a_teacher_trains_on_what_the_teacher_says(tmp_path: Path, top_k: int) -> None:
    model, port, log = save_random_tiny(tmp_path / "model", seed=1), claim_port(None, set()), tmp_path / "teacher.log"
    with started([EXECUTABLE, "replay", "teacher", str(model), "--port", str(port)], log) as teacher:
        wait_until(lambda: answers(port), teacher, log)
        table = f'[{{ name = "big", base_url = "http://{HOST}:{port}/v1" }}]'
        recipe = [str(REPOSITORY / "recipes/local/one_site.toml"), "--output_dir", str(tmp_path / "out")]
        small = ["--max_steps", str(NUM_STEPS), "--orchestrator.batch_size", "16", "--orchestrator.group_size", "16"]
        taught = ["--replay.teachers", table, "--trainer.distill.top_k", str(top_k)]
        taught += [] if top_k else ["--trainer.loss.kwargs.replay_tau", "0.1"]
        keep = ["--orchestrator.train.filter_zero_advantages", "false"]
        done = subprocess.run([EXECUTABLE, "run", *recipe, *small, *taught, *keep], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    paths = RunPaths(tmp_path / "out" / "one-site").site("a")
    trained, played = read_tape(paths.tape("trainer")), read_tape(paths.tape("orchestrator"))
    assert len(trained) == NUM_STEPS
    for step in trained:
        told, loss = (
            ("distill/replay_tokens", "distill/replay_loss") if top_k else ("loss/num_teacher_tokens", "loss/replay")
        )
        assert step[told] == step["train/tokens"] > 0
        assert step[loss] != 0.0
    for step in played[:NUM_STEPS]:
        assert step["replay/tokens"] == step["rollout/tokens"]
        assert step["replay/dropped_tokens"] == step["replay/dropped_tokens/big"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_hinted", [True, False])
def test_a_task_that_rewards_never_teach_is_learned_from_hints_alone(tmp_path: Path, is_hinted: bool) -> None:
    num_steps = 34 if is_hinted else 12  # without hints groups are drawn again: more rollouts in all
    recipe = [str(REPOSITORY / "recipes/local/hints.toml"), "--output_dir", str(tmp_path / "out")]
    without = [] if is_hinted else ["--hints=None"]
    command = [EXECUTABLE, "run", *recipe, "--max_steps", str(num_steps), *without]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    played = read_tape(RunPaths(tmp_path / "out" / "hints").site("a").tape("orchestrator"))
    rewards = [step["rollout/reward"] for step in played[:num_steps]]
    assert max(rewards[:2]) <= 0.05
    last = sum(rewards[-5:]) / 5
    assert last > 0.3 if is_hinted else last <= 0.05, rewards
