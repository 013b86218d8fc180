"""Independent references for the outer arithmetic: numpy fp32, one rounding per operation, and exact fused forms.

`random_fp32` draws every kind of float: random bit patterns (denormals, huge values), values near 1, and zeros.
"""

import functools
from fractions import Fraction

import numpy as np


def random_fp32(rng: np.random.Generator, numel: int, largest: float = 1e30) -> np.ndarray:
    """fp32 [numel], finite, below `largest` in magnitude: a third of it bit patterns drawn uniformly."""
    patterns = np.nan_to_num(rng.integers(0, 2**32, numel, dtype=np.uint32).view(np.float32))
    denormal = (rng.integers(0, 2**23, numel) | rng.integers(0, 2, numel) << 31).astype(np.uint32).view(np.float32)
    near_one = rng.standard_normal(numel).astype(np.float32)
    kind = rng.integers(0, 6, numel)
    x = np.select([kind < 2, kind == 2], [patterns, denormal], near_one).astype(np.float32)
    return np.where(np.abs(x) < largest, x, np.float32(0))


def nesterov(
    params: np.ndarray, pseudograd: np.ndarray, momentum: np.ndarray, lr: float, mu: float
) -> tuple[np.ndarray, np.ndarray]:
    """(params, momentum) after one step, from the formulas, each operation rounded to fp32."""
    lr32, mu32 = np.float32(lr), np.float32(mu)
    momentum = mu32 * momentum + pseudograd
    return params - lr32 * (pseudograd + mu32 * momentum), momentum


def numpy_mean(parts: list[tuple[float, np.ndarray]]) -> np.ndarray:
    """The weighted mean from its definition, one fp32 operation after the other."""
    return functools.reduce(np.add, [np.float32(multiplier) * x for multiplier, x in parts])


def numpy_with_guests(merged: np.ndarray, guests: list[tuple[float, np.ndarray]], share: float) -> np.ndarray:
    """What members make, and of the guests' sum what goes the same way, up to share / (1 - share) of it each value."""
    theirs = numpy_mean(guests)
    limit = np.abs(merged) * np.float32(share / (1 - share))
    along = np.where(np.sign(theirs) == np.sign(merged), np.minimum(np.abs(theirs), limit), np.float32(0))
    return merged + np.copysign(along, merged) + np.float32(0)


def fma(a: float, b: float, c: float) -> float:
    """a * b + c rounded to fp32 once, as a fused multiply-add does it."""
    return float(round_to_fp32(Fraction(a) * Fraction(b) + Fraction(c)))


def round_to_fp32(exact: Fraction) -> np.float32:
    """The fp32 nearest to an exact number, ties to even. Goes by neighbours, so no double rounding."""
    near = np.float32(float(exact))
    candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two fp32 arrays agree in every bit, signs of zeros included."""
    return bool(np.array_equal(left.view(np.uint32), right.view(np.uint32)))
