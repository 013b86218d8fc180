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
    """What one site's tapes hold, by step; a step trained again after a resume counts once, as it went last."""

    reward: dict[int, float] = field(default_factory=dict)
    rollouts_per_s: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, float] = field(default_factory=dict)
    step_s: dict[int, float] = field(default_factory=dict)
    train_s: dict[int, float] = field(default_factory=dict)
    stall_s: dict[int, float] = field(default_factory=dict)
    rounds: dict[int, float] = field(default_factory=dict)
    num_played: dict[int, float] = field(default_factory=dict)
    num_failed: dict[int, float] = field(default_factory=dict)
    tool_calls: dict[int, float] = field(default_factory=dict)
    tool_errors: dict[int, float] = field(default_factory=dict)
    teachers: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """By teacher and step, the share of its turns at which it is heard."""
    probes: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    num_trained: int = 0
    """Steps trained, each time again that one was."""

    def add(self, record: dict[str, float]) -> None:
        """Take in one record of any of the site's tapes; a NaN (no rollout went through) is no value."""
        step = int(record["step"])
        self.num_trained += metrics.TRAIN_TOKENS in record
        for name, series in self._series().items():
            if not math.isnan(record.get(name, math.nan)):
                series[step] = record[name]
        for name, value in record.items():
            kind, _, rest = name.partition("/")
            teacher, _, what = rest.partition("/")
            if kind == "teacher" and what in ("weight", "probes"):
                (self.teachers if what == "weight" else self.probes)[teacher][step] = value

    def trained_rewards(self) -> dict[int, float]:
        """Reward by step, of the steps that were trained on: at the end rollouts have run ahead of the trainer."""
        return {step: self.reward[step] for step in sorted(self.reward) if step in self.tokens}

    def tool_error_shares(self) -> dict[int, float]:
        """By step the share of tool calls that failed; steps without a call are left out, so are those not trained."""
        steps = [step for step in sorted(self.tool_calls) if step in self.tokens and self.tool_calls[step]]
        return {step: self.tool_errors.get(step, 0.0) / self.tool_calls[step] for step in steps}

    def _series(self) -> dict[str, dict[int, float]]:
        return {
            metrics.ROLLOUT_REWARD: self.reward,
            metrics.ROLLOUT_PER_S: self.rollouts_per_s,
            metrics.TRAIN_TOKENS: self.tokens,
            metrics.TRAIN_STEP_S: self.step_s,
            metrics.TRAIN_TRAIN_S: self.train_s,
            metrics.OUTER_STALL_S: self.stall_s,
            metrics.OUTER_ROUND: self.rounds,
            metrics.ROLLOUT_COUNT: self.num_played,
            metrics.ROLLOUT_FAILED: self.num_failed,
            metrics.TOOLS_CALLS: self.tool_calls,
            metrics.TOOLS_ERRORS: self.tool_errors,
        }

    def numbers(self) -> SiteNumbers:
        """The line as of the newest record."""
        num_failed = sum(recent(self.num_failed))
        return SiteNumbers(
            step=len(self.tokens),
            reward=mean(recent(self.reward)),
            rollouts_per_s=mean(recent(self.rollouts_per_s)),
            tokens_per_s=ratio(sum(recent(self.tokens)), sum(recent(self.step_s))),
            rounds=int(max(self.rounds.values(), default=0)),
            stall=ratio(sum(self.stall_s.values()), sum(self.step_s.values())),
            failed=ratio(num_failed, num_failed + sum(recent(self.num_played))),
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


def recent(series: dict[int, float]) -> list[float]:
    """The values of the last RECENT steps."""
    return [series[step] for step in sorted(series)[-RECENT:]]


def mean(values: list[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def ratio(part: float, whole: float) -> float:
    """part / whole; NaN when the whole is nothing."""
    return part / whole if whole else math.nan
