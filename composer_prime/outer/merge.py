"""How a site takes a new master without losing what it did meanwhile. fp32 flat vectors, CPU.

`carry` when its own offer was not in the commit (or it had none out), `settle` when it was: then everything up to the
capture is inside the master and only the movement since then is its own.
Each also comes as a `Change` that is made span by span, where the values lie: the training thread waits for it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

SPAN_ELEMENTS = 2**17
"""Elements of a span: what one operation wrote is in a core's cache for the next one."""

Change = Callable[[Tensor, slice], Tensor]
"""(local values of a span, the span within the fragment) -> the span's new values."""


def changed(local: Tensor, change: Change, start: int = 0) -> Tensor:
    """Put `change` in place of `local`, fp32 [n] contiguous on the CPU, which begins at `start` of its fragment."""
    for at in range(0, local.numel(), SPAN_ELEMENTS):
        span = local[at : at + SPAN_ELEMENTS]
        span.copy_(change(span, slice(start + at, start + at + span.numel())))
    return local


def carrying(old_base: Tensor, new_base: Tensor) -> Change:
    """`carry`, span by span."""
    return lambda local, span: carry(local, old_base[span], new_base[span])


def settling(captured: Tensor, new_base: Tensor) -> Change:
    """`settle`, span by span."""
    return lambda local, span: settle(local, captured[span], new_base[span])


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
