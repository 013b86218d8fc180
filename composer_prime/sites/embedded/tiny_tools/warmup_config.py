"""How the tiny model that uses tools is warmed up; without torch, since a model that is there is found without it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolWarmUpConfig:
    """What the warm-up does; part of the cache key of a warm model."""

    copy_steps: int = 150
    steps: int = 600
    batch_size: int = 4
    lr: float = 3e-3
    ramp_steps: int = 20
    decay_steps: int = 300
    say_every: int = 100


TOOL_WARM_UP = ToolWarmUpConfig()
SMALL_WARM_UP = ToolWarmUpConfig(copy_steps=300, lr=1e-3)
"""Of the larger model, which takes smaller steps, and so more of them until it copies."""
