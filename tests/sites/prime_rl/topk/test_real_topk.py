"""Distributions in upstream's unmodified trainer, on 1 and 2 ranks, tied and untied, fused and plain."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_prime.config.distill import DistillConfig
from composer_prime.sites.prime_rl import versions
from composer_prime.sites.prime_rl.settings import DISTILL
from tests.sites.prime_rl.launched import REPOSITORY
from tests.sites.prime_rl.real_runs import SHAPE, RealTrainer, _save, source_path, upstream

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("PRIME_RL_SRC"), reason="PRIME_RL_SRC names no PRIME-RL checkout"),
]

WATCHED = "tests.sites.prime_rl.topk.whole.loss"
IN_FP32 = ("tests.sites.prime_rl.topk.in_fp32",)
PLAIN, FUSED = "disabled", 8
ON = {DISTILL: DistillConfig().model_dump_json()}
TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def only_where_rollouts_are_fed() -> None:
    """The older versions' senders are others."""
    if upstream() is not versions.MAIN:
        pytest.skip("rollouts are written for main's transport alone")


def model(folder: Path, tied: bool) -> Path:
    """A Qwen3 of two layers with random weights; its head is its embedding if tied."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = SHAPE | {"tie_word_embeddings": tied}
    torch.manual_seed(0)
    return _save(folder / f"model_{tied}", Qwen3ForCausalLM(Qwen3Config(**shape)))


def trained(
    folder: Path, name: str, tied: bool, head: Any, ranks: int, env: dict[str, str], **config: Any
) -> tuple[RealTrainer, dict[str, Tensor]]:
    """Upstream's trainer after one step on taught rollouts, and the gradient it stepped by."""
    kept = folder / f"{name}.pt"
    table = {"model": {"fused_lm_head_token_chunk_size": head}, "max_steps": 1, "ckpt": None}
    loss = {"loss": {"type": "custom", "import_path": WATCHED, "kwargs": {"inner": "ipo"}}}
    trainer = RealTrainer(
        folder / name,
        ranks,
        {"KEEP_GRADIENT": str(kept), **env},
        model=model(folder, tied),
        config=table | loss | config,
        within=IN_FP32,
    )
    job = json.dumps({"folder": str(trainer.folder), "num_ranks": ranks, "last": 1})
    path = os.pathsep.join([*map(str, [*source_path(), REPOSITORY]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.sites.prime_rl.topk.feed_taught", job]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trainer.start().finish()
    return trainer, torch.load(kept)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [FUSED, PLAIN])
def test_the_step_1_gradient_is_within_1e_6_of_that_of_the_full_logits(
    tmp_path: Path, head: Any, tied: bool, ranks: int
) -> None:
    _, ours = trained(tmp_path, "ours", tied, head, ranks, ON)
    _, whole = trained(tmp_path, "whole", tied, PLAIN, ranks, {"WHOLE_TERM": "1"})
    _, stock = trained(tmp_path, "stock", tied, head, ranks, {})
    assert ours.keys() == whole.keys() == stock.keys()
    norm = torch.stack([value.norm() for value in whole.values()]).norm()
    apart = {name: ((ours[name] - whole[name]).norm() / norm).item() for name in whole}
    added = max(((stock[name] - whole[name]).norm() / norm).item() for name in whole)
    print(f"head={head} tied={tied} ranks={ranks}: apart {max(apart.values()):.1e}, stock {added:.1e}")
    assert max(apart.values()) <= TOLERANCE < added


def test_a_router_replay_ends_the_trainer_in_one_line(tmp_path: Path) -> None:
    trainer = RealTrainer(
        tmp_path / "refused", 1, ON, model=model(tmp_path, False), config={"enable_router_replay": True}, within=IN_FP32
    )
    code, output = trainer.start().wait()
    assert code == 2 and "composer-prime: trainer.enable_router_replay must be off" in output
