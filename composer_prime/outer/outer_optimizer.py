"""The outer optimizer: Nesterov momentum on the masters, as in DiLoCo, with every rounding spelled out.

Masters are recomputed by each site and compared by hash, so the step is a fixed sequence of single fp32 operations;
`torch.optim.SGD` fuses multiply-adds where the machine can, and then two machines disagree in the last bit.
"""

import torch
from torch import Tensor

from composer_prime.outer.chunks import empty, first_nonfinite, spans

STEP_ELEMENTS = 2**17
"""Elements of a span: small enough that what one operation wrote is in the cache for the next one."""


def nesterov_step(params: Tensor, pseudograd: Tensor, momentum: Tensor, *, lr: float, mu: float) -> None:
    """Move one fragment's global weights one outer step, in place.

    params      fp32, any shape, contiguous, CPU; global weights at the start of the round. Updated.
    pseudograd  fp32, same shape; start minus end of round, averaged over sites.
    momentum    fp32, same shape; zeros before the first round. Updated.
    lr, mu      outer learning rate and momentum; rounded to fp32 before use.

    With every operation rounded to fp32 on its own, so the bits are those of numpy on any machine:

        momentum = mu * momentum + pseudograd
        params   = params - lr * (pseudograd + mu * momentum)

    Source: DiLoCo (arXiv:2311.08105). Equals torch.optim.SGD(lr, momentum=mu, nesterov=True), which fuses, to 2 ulp of
    the largest term of the last line at DiLoCo's settings, and to 4 at the worst found.
    """
    weights, gradient, velocity = params.view(-1), pseudograd.view(-1), momentum.view(-1)
    for start, stop in spans(weights.numel(), STEP_ELEMENTS):
        span = slice(start, stop)
        _step(weights[span], gradient[span], velocity[span], weights[span], velocity[span], lr, mu)


def nesterov_next(
    params: Tensor, pseudograd: Tensor, momentum: Tensor | None, *, lr: float, mu: float
) -> tuple[Tensor, Tensor | None] | None:
    """What `nesterov_step` would make of params and momentum, fp32 [n] each in new memory; the given ones stay.

    momentum   None where mu is 0: then params become params - lr * pseudograd, and there is no momentum to keep

    None when a value of either isn't finite any more.
    """
    if momentum is None:
        assert mu == 0.0
        return _descend(params, pseudograd, lr)
    weights, velocity = empty(params.numel()), empty(params.numel())
    for start, stop in spans(params.numel(), STEP_ELEMENTS):
        span = slice(start, stop)
        _step(params[span], pseudograd[span], momentum[span], weights[span], velocity[span], lr, mu)
        if first_nonfinite(weights[span]) is not None or first_nonfinite(velocity[span]) is not None:
            return None
    return weights, velocity


def _descend(params: Tensor, pseudograd: Tensor, lr: float) -> tuple[Tensor, None] | None:
    weights = empty(params.numel())
    for start, stop in spans(params.numel(), STEP_ELEMENTS):
        span = slice(start, stop)
        moved = weights[span]
        torch.mul(pseudograd[span], lr, out=moved)
        torch.sub(params[span], moved, out=moved)
        if first_nonfinite(moved) is not None:
            return None
    return weights, None


def _step(p: Tensor, g: Tensor, m: Tensor, next_p: Tensor, next_m: Tensor, lr: float, mu: float) -> None:
    torch.mul(m, mu, out=next_m)
    torch.add(next_m, g, out=next_m)
    step = torch.mul(next_m, mu)
    torch.add(g, step, out=step)
    torch.mul(step, lr, out=step)
    torch.sub(p, step, out=next_p)
