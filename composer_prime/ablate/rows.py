"""One finished run of an ablation as a small JSON file: what the report, a dry run and a resume read.

A row is written last and whole, so that a run has either all of its numbers or none.
"""

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field

from composer_prime import metrics
from composer_prime.config.paths import RunPaths
from composer_prime.config.table import Table
from composer_prime.metrics import read_tape


class Row(Table, extra="ignore"):
    """One (arm, seed) that is done, all its sites together."""

    arm: str
    seed: int
    recipe_sha256: str
    """Of the arm's effective recipe (`Arm.sha256`)."""

    held_out_prompts: int = Field(ge=1)
    held_out: float
    """Mean reward of the final weights on the held-out tasks, greedy."""

    held_out_s: float = Field(ge=0)
    """Seconds that one held-out evaluation took."""

    start: float | None = None
    """Held-out reward of the model that it began with; rows of the first arm and of restarts have it."""

    restarted_from: str | None = None
    """The arm whose final weights a restart began with."""

    steps: int = Field(ge=1)
    """Training steps of a site."""

    rollouts: int = Field(ge=0)
    generated_tokens: int = Field(ge=0)
    """Tokens that the policy generated, also those that no step trained on, and again after a resume."""

    unanswered_tokens: int = Field(default=0, ge=0)
    """Of these, the tokens for which every replay teacher dropped out."""

    run_s: float = Field(ge=0)
    """Seconds from the command's start to its end, over all its starts but those that were killed (SIGKILL)."""

    rewards: tuple[float, ...]
    """Mean training reward over the sites by step, of the steps that had one."""

    @property
    def reward_mean(self) -> float:
        """Area under the curve of training reward, a step being 1/steps wide: the mean over the steps."""
        return fmean(self.rewards) if self.rewards else math.nan

    @property
    def seconds(self) -> float:
        """What the arm cost: the run and its held-out evaluation, without that of the untrained model."""
        return self.run_s + self.held_out_s


def load_row(path: Path) -> Row | None:
    """The row in that file; None when there is none."""
    try:
        return Row.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def read_measured(paths: RunPaths) -> dict[str, Any]:
    """What a finished run's folder says, by the names of a row."""
    from composer_prime.sites.embedded.summary import read_progress
    from composer_prime.teachers.stamp import REPLAY_UNANSWERED

    summary = json.loads(paths.summary.read_text(encoding="utf-8"))
    names = list(summary["sites"])
    curves = [read_progress(paths.site(name)).trained_rewards() for name in names]
    steps = sorted({step for curve in curves for step in curve})
    tape = [record for name in names for record in read_tape(paths.site(name).tape("orchestrator"))]

    def total(name: str) -> int:
        return int(sum(record.get(name, 0.0) for record in tape))

    return {
        "steps": max(site["steps"] for site in summary["sites"].values()),
        "rollouts": total(metrics.ROLLOUT_COUNT),
        "generated_tokens": total(metrics.ROLLOUT_TOKENS),
        "unanswered_tokens": total(REPLAY_UNANSWERED),
        "run_s": summary["wall_s"],
        "rewards": tuple(fmean(curve[step] for curve in curves if step in curve) for step in steps),
    }
