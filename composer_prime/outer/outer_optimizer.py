"""The outer optimizer: Nesterov momentum on the masters, as in DiLoCo, with every rounding spelled out.

Masters are recomputed by each site and compared by hash, so the step is a fixed sequence of single fp32 operations;
`torch.optim.SGD` fuses multiply-adds where the machine can, and then two machines disagree in the last bit.
"""

import torch
from torch import Tensor

from composer_prime.outer.chunks import scratch, spans


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
    steps = scratch(weights.numel())
    for start, stop in spans(weights.numel()):
        p, g, m, step = weights[start:stop], gradient[start:stop], velocity[start:stop], steps[: stop - start]
        torch.mul(m, mu, out=m)
        torch.add(m, g, out=m)
        torch.mul(m, mu, out=step)
        torch.add(g, step, out=step)
        torch.mul(step, lr, out=step)
        torch.sub(p, step, out=p)
