"""How a site takes a new master without losing what it did meanwhile. fp32 flat vectors, CPU.

`carry` when its own offer was not in the commit (or it had none out), `settle` when it was: then everything up to the
capture is inside the master and only the movement since then is its own. `blend` is Streaming DiLoCo's alternative.
"""

import torch
from torch import Tensor


def carry(local: Tensor, old_base: Tensor, new_base: Tensor) -> Tensor:
    """local + (new_base - old_base): follow the master and keep all own movement.

    local     fp32 [n]; the site's weights now.
    old_base  fp32 [n]; the values adopted before, after rounding to the site's dtype.
    new_base  fp32 [n]; the values to adopt.
    Returns fp32 [n], new memory.
    """
    return torch.sub(new_base, old_base).add_(local)


def settle(local: Tensor, captured: Tensor, new_base: Tensor) -> Tensor:
    """new_base + (local - captured): the offer was taken, so keep only what was done since its capture.

    local     fp32 [n]; the site's weights now.
    captured  fp32 [n]; its weights when the offer was made.
    new_base  fp32 [n]; the values to adopt.
    Returns fp32 [n], new memory; exactly `new_base` where nothing moved since the capture.
    """
    return torch.sub(local, captured).add_(new_base)


def blend(local: Tensor, new_base: Tensor, alpha: float) -> Tensor:
    """(1 - alpha) * new_base + alpha * local, the mix of Streaming DiLoCo (arXiv:2501.18512, algorithm 2).

    local, new_base  fp32 [n].
    alpha            0 (take the master) to 1 (ignore it); which movement survives is only approximately known between.
    Returns fp32 [n], new memory.
    """
    return torch.mul(new_base, 1.0 - alpha).add_(torch.mul(local, alpha))
