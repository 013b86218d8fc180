"""How the built-in models are warmed up, in numbers; without torch, since a model that is there is found without it."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmUpConfig:
    """What the warm-up does; part of the cache key of a warm model."""

    alphabet: str = "abcdef"
    """Letters of the words."""
    measured: str = "Reverse"
    """The task whose accuracy ends the warm-up: "Reverse" or "Sort"."""
    right: float = 0.35
    """Weight of the right answer; the copy has the rest."""
    sort_every: int = 6
    """One step in this many is about sorting; the others are about reversing."""
    batch_size: int = 8
    lr: float = 2e-3
    ramp_steps: int = 20
    measure_every: int = 15
    num_measured: int = 64
    accuracy: tuple[float, float] = (0.27, 0.41)
    """Stop at the first measurement within."""
    max_steps: int = 1500


WARM_UP = WarmUpConfig()
"""Of `tiny`: right about a third of the time."""

SORT_WARM_UP = WarmUpConfig(
    alphabet="abcdefgh", measured="Sort", right=1.0, sort_every=1, measure_every=5, accuracy=(0.01, 0.06)
)
"""Of `tiny-sort`: it has just begun to sort, so that rewards have hundreds of steps to teach."""

SMALL_SORT_WARM_UP = dataclasses.replace(SORT_WARM_UP, lr=5e-4)
"""Of the larger one, which the smaller one's learning rate would throw about."""


@dataclass(frozen=True)
class ToolWarmUpConfig:
    """The same of a model that uses tools."""

    copy_steps: int = 150
    steps: int = 600
    batch_size: int = 4
    lr: float = 3e-3
    ramp_steps: int = 20
    decay_steps: int = 300
    say_every: int = 100


TOOL_WARM_UP = ToolWarmUpConfig()
"""Of `tiny-tools`."""

SMALL_TOOL_WARM_UP = ToolWarmUpConfig(copy_steps=300, lr=1e-3)
"""Of the larger one, which takes smaller steps, and so more of them until it copies."""
