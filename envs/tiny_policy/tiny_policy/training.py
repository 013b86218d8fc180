"""Supervised training on demonstrations, until what the player says on fresh tasks gets no more likely."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiny_policy.descent import adamw, descend, learn_to_copy
from tiny_policy.packing import Batch, pack
from tiny_policy.rendering import Sample


@dataclass(frozen=True)
class Likeliness:
    """Mean probability of a demonstrated turn on held-out tasks at temperature 1; None: there is no such turn."""

    plain: float | None
    hinted: float | None

    def __str__(self) -> str:
        hinted = "" if self.hinted is None else f", and {self.hinted:.2f} after a hint"
        return f"{0.0 if self.plain is None else self.plain:.2f} without a hint{hinted}"


@dataclass(frozen=True)
class TrainingConfig:
    """How a tiny policy is trained."""

    steps: int = 1000
    """The most there may be, the last `decay_steps` of which lower the learning rate to 0."""
    batch_size: int = 6
    """Families of samples, each with `family_size` of its own at most: many tasks in a step teach copying sooner."""
    family_size: int = 2
    lr: float = 3e-3
    ramp_steps: int = 20
    decay_steps: int = 100
    measure_every: int = 50
    first_steps: int = 300
    patience: int = 4
    """Measurements without a rise, after the first steps, with which training ends."""
    least_rise: float = 0.01
    copy_steps: int = 200
    """Steps on random tokens said twice, before the others."""


TRAINING = TrainingConfig()
NUM_MEASURED = 24
"""Held-out families that are looked at while training; at its end it is all of them."""

Progress = Callable[[int, Likeliness], None]


def train(
    model: Any,
    shown: Sequence[Sequence[Sample]],
    held_out: Sequence[Sequence[Sample]],
    *,
    seed: int,
    config: TrainingConfig,
    progress: Progress,
) -> int:
    """Train `model` in place, fp32 on the CPU; the steps that it took. The same seed gives the same model.

    shown, held_out  families of samples, of tasks that are learned from, and of others.
    """
    learn_to_copy(model, seed, steps=config.copy_steps, lr=config.lr)
    draws = _draws(shown, seed, config.family_size)
    judged = batches(held_out[:NUM_MEASURED])
    optimizer = adamw(model, config.lr)
    plateau = _Plateau(config)
    end = config.steps  # moved forward when nothing rises any more
    for step in range(1, config.steps + 1):
        rate = min(step / config.ramp_steps, (end - step + 1) / config.decay_steps, 1.0)
        optimizer.param_groups[0]["lr"] = config.lr * rate
        model.train()
        batch = pack(list(itertools.islice(draws, config.batch_size)))
        descend(model, optimizer, -batch.turn_logprobs(model).sum() / len(batch.targets))
        if step % config.measure_every == 0 and end == config.steps:
            found, loss = measure(model, judged)
            progress(step, found)
            if plateau.reached(step, found, loss):
                end = min(end, step + config.decay_steps)
        if step == end:
            break
    model.eval()
    return step


def batches(families: Sequence[Sequence[Sample]]) -> list[Batch]:
    """Families as `measure` takes them."""
    return [pack(families[first : first + 4]) for first in range(0, len(families), 4)]


@torch.no_grad()
def measure(model: Any, judged: Sequence[Batch]) -> tuple[Likeliness, float]:
    """How likely the demonstrated turns are, and their mean loss (nats a token)."""
    model.eval()
    probabilities: dict[bool, list[float]] = {False: [], True: []}
    total = 0.0
    for batch in judged:
        logprobs = batch.turn_logprobs(model)
        total -= float(logprobs.sum())
        for hinted, probability in zip(batch.hinted, logprobs.exp().tolist(), strict=True):
            probabilities[hinted].append(probability)
    plain, hinted = (sum(found) / len(found) if found else None for found in probabilities.values())
    return Likeliness(plain, hinted), total / sum(len(batch.targets) for batch in judged)


def _draws(families: Sequence[Sequence[Sample]], seed: int, most: int) -> Iterator[Sequence[Sample]]:
    """Families without end, `most` samples of each, in a seeded order; each once before any comes again."""
    dice = random.Random(seed)
    while True:
        for family in dice.sample(families, len(families)):
            yield dice.sample(family, min(most, len(family)))


class _Plateau:
    """Says when neither kind of turn has got likelier, nor the loss lower, for a while; or can't any more."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._best = [0.0, 0.0]
        self._loss = float("inf")
        self._since = 0

    def reached(self, step: int, found: Likeliness, loss: float) -> bool:
        values = [found.plain or 0.0, found.hinted or 0.0]
        if all(value is None or value > 1 - self._config.least_rise for value in (found.plain, found.hinted)):
            return True
        rises = any(value > best + self._config.least_rise for value, best in zip(values, self._best, strict=True))
        rises |= loss < (1 - self._config.least_rise) * self._loss
        if rises:
            self._best = [max(pair) for pair in zip(values, self._best, strict=True)]
            self._loss = min(loss, self._loss)
        self._since = 0 if rises or step <= self._config.first_steps else self._since + 1
        return self._since >= self._config.patience
