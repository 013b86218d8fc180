"""How the tiny model is warmed up; apart from warmup.py, since a model that is there already is found without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WarmUpConfig:
    """What the warm-up does; part of the cache key of a warm model."""

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
"""The one that every tiny model has had."""
