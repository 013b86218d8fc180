"""How the offers that a commit takes become one pseudo-gradient: their weighted mean, every rounding spelled out.

Every site computes this for itself and all must get the same bits, so products, sums, minima and maxima are separate
fp32 operations in a fixed order (sites sorted by name), never a fused multiply-add, whose use differs between machines.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from composer_prime.outer.chunks import empty, scratch, spans
from composer_prime.outer.sparse import Sparse, Vector, dense, weighted_sum


def add_guests(merged: Tensor, guests: Sequence[tuple[float, Vector]], share: float) -> None:
    """Add what a round's guests offer to what its members' make, in place: value by value it lengthens the members'
    step by up to `share / (1 - share)` of it, and never shortens it or turns it around.

    merged  fp32 [n] contiguous, of the members alone. Updated.
    guests  at least one (multiplier, x), as `weighted_mean` has them; summed left to right: the order decides the bits.
    share   of a step, the most that guests make; above 0, below 1.

    After the sign election of TIES-Merging (arXiv:2306.01708), where the members alone elect.
    """
    theirs = _dense_mean([(multiplier, dense(x)) for multiplier, x in guests])
    most, limits = float(np.float32(share / (1 - share))), scratch(merged.numel())
    for start, stop in spans(merged.numel()):
        own, added, limit = merged[start:stop], theirs[start:stop], limits[: stop - start]
        torch.mul(own, most, out=limit)
        torch.maximum(added, limit.clamp(max=0.0), out=added)
        torch.minimum(added, limit.clamp_(min=0.0), out=added)
        torch.add(added, 0.0, out=added)  # whichever zero it is: the same bits everywhere
        torch.add(own, added, out=own)


def weighted_mean(parts: Sequence[tuple[float, Vector]]) -> Tensor:
    """sum(multiplier * x), left to right, each product and each sum rounded to fp32 on its own.

    parts  at least one (multiplier, x): multiplier an fp32 value, with its clipping inside (see shares.py); x fp32 [n]
           contiguous on the CPU or its sparse form, all finite. The order decides the bits: callers sort by site name.
    Returns fp32 [n], new memory.
    """
    few = [(multiplier, x) for multiplier, x in parts if isinstance(x, Sparse)]
    total = weighted_sum(few) if len(few) == len(parts) else None  # the same bits, zeros passed over
    return _dense_mean([(multiplier, dense(x)) for multiplier, x in parts]) if total is None else total


def _dense_mean(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    total = empty(parts[0][1].numel())
    products = scratch(total.numel())
    for start, stop in spans(total.numel()):
        chunk, product = total[start:stop], products[: stop - start]
        torch.mul(parts[0][1][start:stop], parts[0][0], out=chunk)
        for multiplier, x in parts[1:]:
            torch.mul(x[start:stop], multiplier, out=product)
            torch.add(chunk, product, out=chunk)
    return total
