"""A vector that is zero but at a few places, as codecs that keep few values decode it: work grows with those few.

Whatever is done with one gives the bits that the same operations on `dense()` would.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sparse:
    """fp32 [length], zero but at `places`.

    places   int64 [k], rising
    values   fp32 [k]; never -0.0
    """

    length: int
    places: np.ndarray
    values: np.ndarray

    def numel(self) -> int:
        """Elements of the whole vector, zeros included."""
        return self.length

    def dense(self) -> Tensor:
        """The whole vector in new memory: fp32 [length]."""
        whole = np.zeros(self.length, dtype=np.float32)
        whole[self.places] = self.values
        return torch.from_numpy(whole)

    def subtract_from(self, x: Tensor) -> None:
        """x -= dense(), for x fp32 [length] contiguous on the CPU."""
        x.numpy()[self.places] -= self.values


Vector = Tensor | Sparse
"""What a payload decodes to: fp32 [n] on the CPU, in one of its two forms."""


def dense(vector: Vector) -> Tensor:
    """The whole vector; `vector` itself where it is one already."""
    return vector.dense() if isinstance(vector, Sparse) else vector


def weighted_sum(parts: list[tuple[float, Sparse]]) -> Tensor | None:
    """sum(multiplier * x), left to right, as `aggregate.weighted_mean` of the dense vectors, bit for bit.

    parts  at least one (multiplier, x) of one length; multiplier an fp32 value, not negative.
    Returns fp32 [n], new memory; None when a product underflowed to -0.0, whose sign depends on the zeros added to it.
    """
    total = np.zeros(parts[0][1].length, dtype=np.float32)
    for multiplier, x in parts:
        products = x.values * np.float32(multiplier)
        if bool((np.signbit(products) & (products == 0)).any()):
            return None
        total[x.places] += products
    return torch.from_numpy(total)
