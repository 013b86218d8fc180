"""Follows the metrics tapes of a site while they grow, and boils them down to what a person watches.

Reads files only, and only what is new: it can run beside the site or after it, and costs next to nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

from composer_prime import metrics
from composer_prime.config.paths import SitePaths
from composer_prime.waiting import Waiting, read_waiting

RECENT = 3
"""Records that a rate or a shown reward is the mean of: a step's reward alone is too noisy to read."""


@dataclass(frozen=True)
class SiteNumbers:
    """One line of what a person watches; a number that isn't known yet is NaN."""

    step: int = 0
    """Training steps done."""
    reward: float = math.nan
    """Mean over the last RECENT steps."""
    rollouts_per_s: float = math.nan
    tokens_per_s: float = math.nan
    """Tokens trained on a second, waiting included."""
    rounds: int = 0
    """Outer rounds merged, over all fragments."""
    waiting: Waiting | None = None
    stall: float = math.nan
    """Share of the wall time of its training, waiting included, in which it was stalled on the outer loop."""
    failed: float = math.nan
    """Share of the rollouts of the last RECENT steps that failed."""


@dataclass
class SiteProgress:
    """What one site's tapes hold; a step trained again after a resume counts once, as it went last."""

    series: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """By metric and step."""
    num_trained: int = 0
    """Steps trained, each time again that one was."""

    def add(self, record: dict[str, float]) -> None:
        """Take in one record of any of the site's tapes; a NaN (no rollout went through) is no value."""
        self.num_trained += metrics.TRAIN_TOKENS in record
        for name, value in record.items():
            if not math.isnan(value):
                self.series[name][int(record["step"])] = value

    def trained_rewards(self) -> dict[int, float]:
        """Reward by step, of the steps that were trained on: at the end rollouts have run ahead of the trainer."""
        rewards = self.series[metrics.ROLLOUT_REWARD]
        return {step: rewards[step] for step in sorted(rewards) if step in self.series[metrics.TRAIN_TOKENS]}

    def tool_error_shares(self) -> dict[int, float]:
        """By step the share of tool calls that failed; steps without a call are left out, so are those not trained."""
        calls, errors = self.series[metrics.TOOLS_CALLS], self.series[metrics.TOOLS_ERRORS]
        steps = [step for step in sorted(calls) if step in self.series[metrics.TRAIN_TOKENS] and calls[step]]
        return {step: errors.get(step, 0.0) / calls[step] for step in steps}

    def teacher_weights(self) -> dict[str, dict[int, float]]:
        """By teacher and step, in order, the share of its turns at which it is heard."""
        named = {name.split("/", 1)[1]: values for name, values in self.series.items() if name.startswith("teacher/")}
        return {
            name.removesuffix("/weight"): dict(sorted(values.items()))
            for name, values in named.items()
            if name.endswith("/weight")
        }

    def total(self, name: str) -> float:
        """The sum of a metric over all steps."""
        return sum(self.series[name].values())

    def recent(self, name: str) -> list[float]:
        """A metric's values at the last RECENT steps that have one."""
        values = self.series[name]
        return [values[step] for step in sorted(values)[-RECENT:]]

    def numbers(self) -> SiteNumbers:
        """The line as of the newest record."""
        num_failed = sum(self.recent(metrics.ROLLOUT_FAILED))
        return SiteNumbers(
            step=len(self.series[metrics.TRAIN_TOKENS]),
            reward=mean(self.recent(metrics.ROLLOUT_REWARD)),
            rollouts_per_s=mean(self.recent(metrics.ROLLOUT_PER_S)),
            tokens_per_s=ratio(sum(self.recent(metrics.TRAIN_TOKENS)), sum(self.recent(metrics.TRAIN_STEP_S))),
            rounds=int(max(self.series[metrics.OUTER_ROUND].values(), default=0)),
            stall=ratio(self.total(metrics.OUTER_STALL_S), self.total(metrics.TRAIN_STEP_S)),
            failed=ratio(num_failed, num_failed + sum(self.recent(metrics.ROLLOUT_COUNT))),
        )


class SiteFollower:
    """Follows all tapes of one site."""

    def __init__(self, paths: SitePaths) -> None:
        self.progress = SiteProgress()
        self._waiting = [paths.waiting(role) for role in ("trainer", "orchestrator")]
        self._tapes = [metrics.TapeFollower(paths.tape(role)) for role in ("orchestrator", "trainer")]

    def update(self) -> SiteNumbers:
        """Read what is new and give the line as of now."""
        for tape in self._tapes:
            for record in tape.new_records():
                self.progress.add(record)
        waiting = next(filter(None, map(read_waiting, self._waiting)), None)
        return replace(self.progress.numbers(), waiting=waiting)


def mean(values: list[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def ratio(part: float, whole: float) -> float:
    """part / whole; NaN when the whole is nothing."""
    return part / whole if whole else math.nan
