"""How long flat fp32 vectors are walked: in spans, so that temporaries stay small and near the core.

Walking changes no bit of any result, only speed and memory: on 33 M values whole tensors coded int8 at about half the
speed of spans, while spans of 64 Ki to 4 Mi elements didn't differ by more than the noise of a shared machine.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from composer_prime.outer.reuse import RESERVE

CHUNK_ELEMENTS = 4 * 2**20
"""Elements in a span; a multiple of every codec's block."""


def spans(numel: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive spans of at most `CHUNK_ELEMENTS` that cover `range(numel)`."""
    for start in range(0, numel, CHUNK_ELEMENTS):
        yield start, min(start + CHUNK_ELEMENTS, numel)


def empty(numel: int) -> Tensor:
    """fp32 [numel] on the CPU, not initialised; where it is long, in memory that was used before (reuse.py).

    From numpy, which asks the kernel for huge pages: for vectors of 100 MB and more, first touches of small pages cost
    more than the arithmetic.
    """
    return torch.from_numpy(RESERVE.take(4 * numel).view(np.float32))


def scratch(numel: int) -> Tensor:
    """fp32 [length of the longest span of `numel` elements] on the CPU, not initialised; reused from span to span."""
    return torch.empty(min(numel, CHUNK_ELEMENTS), dtype=torch.float32)


def first_nonfinite(x: Tensor) -> int | None:
    """Index of the first NaN or infinity of x, any float dtype, 1-D; None when all values are finite."""
    for start, stop in spans(x.numel()):
        least, greatest = torch.aminmax(x[start:stop])  # both NaN as soon as one value is
        if not (float(least) > -math.inf and float(greatest) < math.inf):
            return start + int(torch.nonzero(~torch.isfinite(x[start:stop]))[0])
    return None
