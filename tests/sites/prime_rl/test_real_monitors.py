"""Our metrics in upstream's own monitors, the metrics file and wandb offline, beside `mismatch_kl`."""

import os
from pathlib import Path
from typing import Any

import pytest

from composer_prime import metrics
from tests.patience import wait_until
from tests.sites.prime_rl.launched import OWN, WRAPPED, announced
from tests.sites.prime_rl.real_runs import feed, real_site, save_model, upstream
from tests.sites.prime_rl.turns import assert_turns_left_out
from tests.wandb_files import history

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("PRIME_RL_SRC"), reason="PRIME_RL_SRC names no PRIME-RL checkout"),
]

WANDB = {"offline": True, "project": "test"}
MONITORS: dict[str, dict[str, Any]] = {
    "v0.8.0": {"wandb": WANDB, "file_monitor": {}},
    "559b447": {"monitors": {"wandb": WANDB, "file": {}}},
}
"""What switches the monitors on, by version."""
OUTER = {
    metrics.OUTER_ROUND,
    metrics.OUTER_STALL_S,
    metrics.OUTER_TURN_S,
    metrics.OUTER_UPLOAD_S,
    metrics.OUTER_BYTES_UP,
    metrics.OUTER_BYTES_DOWN,
}
THEIRS = "mismatch_kl/all/mean"
OURS = {"policy_loss/mean", "kl_loss/mean", "replay_loss/mean", "is_masked/mean", "mismatch_kl/mean"}


def assert_beside_mismatch_kl(records: list[dict[str, Any]]) -> None:
    by_step: dict[int, dict[str, Any]] = {}
    for record in records:
        if "step" in record:
            by_step.setdefault(record["step"], {}).update(record)
        if THEIRS in record:
            assert record.keys() >= OURS
    assert sorted(by_step) == [1, 2, 3, 4]
    assert all(record.keys() >= {*OUTER, *OURS, THEIRS, "time/step"} for record in by_step.values())
    rounds = [by_step[step][metrics.OUTER_ROUND] for step in sorted(by_step)]
    assert rounds == sorted(rounds) and rounds[0] == 0 and rounds[-1] == 3


def test_our_metrics_stand_beside_mismatch_kl_in_the_file_and_in_wandb(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    trainer = real_site(
        tmp_path, "a", model, announced(tmp_path / "bucket", inner_steps=2), **MONITORS[upstream().name]
    )
    trainer.env["WANDB_MODE"] = "offline"
    feed(trainer)
    trainer.start().finish()
    assert_beside_mismatch_kl(history(trainer.folder))
    assert_beside_mismatch_kl(trainer.metrics())


def test_upstreams_own_time_leaves_the_outer_loops_turns_out(tmp_path: Path) -> None:
    model, uri = save_model(tmp_path / "model"), announced(tmp_path / "bucket", inner_steps=2, quorum=2)
    times, loss = tmp_path / "times", {"type": "custom", "import_path": WRAPPED, "kwargs": {"inner": f"{OWN}.my_loss"}}
    first = real_site(tmp_path, "a", model, uri, loss=loss, **MONITORS[upstream().name])
    first.env |= {"WANDB_MODE": "offline", "TIMES_FILE": str(times)}
    second = real_site(tmp_path, "b", model, uri)
    feed(first, second)
    first.start()
    wait_until(lambda: times.exists() or first.has_ended(), "a step of the first site")
    second.start()  # the first one's turn waits until this one offers
    first.finish()
    second.finish()
    assert_turns_left_out(times, history(first.folder))
