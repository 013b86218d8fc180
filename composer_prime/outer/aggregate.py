"""How the offers that a commit takes become one pseudo-gradient: a weighted mean with every rounding spelled out.

Every site computes this for itself and all must get the same bits, so products and sums are separate fp32 operations
in the order given (sites sorted by name), never a fused multiply-add, whose use differs between machines.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from composer_prime.outer.chunks import empty, scratch, spans


def weighted_mean(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    """sum(multiplier * x), left to right, each product and each sum rounded to fp32 on its own.

    parts  at least one (multiplier, x): multiplier an fp32 value, x fp32 [n] contiguous on the CPU. The order decides
           the bits: callers sort by site name.
    Returns fp32 [n], new memory. Raises ValueError when `parts` is empty or lengths differ.
    """
    if len({x.numel() for _, x in parts}) != 1:
        raise ValueError(f"weighted_mean needs 1 or more vectors of one length, got {[x.numel() for _, x in parts]}")
    total = empty(parts[0][1].numel())
    products = scratch(total.numel())
    for start, stop in spans(total.numel()):
        chunk, product = total[start:stop], products[: stop - start]
        torch.mul(parts[0][1][start:stop], parts[0][0], out=chunk)
        for multiplier, x in parts[1:]:
            torch.mul(x[start:stop], multiplier, out=product)
            torch.add(chunk, product, out=chunk)
    return total
