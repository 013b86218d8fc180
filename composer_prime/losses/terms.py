"""The pieces of the loss: importance ratio, trust region, the factor each term puts on the ratio, and safe sums.

Elementwise and free of data-dependent branches, so that plain and compiled runs agree. Each piece is finite for any two
logprobs that aren't NaN, because one stray infinity times a zero mask would turn a whole batch into NaN.
"""

import math

import torch
from torch import Tensor

# Largest x with a finite exp(x).
_MAX_EXPONENT = {torch.float32: 88.72283, torch.float64: 709.782712893}

LEAST_LOGPROB = -104.0
"""Nats: the log of what fp32 rounds to 0, so what a log-probability of -inf stands for."""


def working_dtype(logprobs: Tensor) -> torch.dtype:
    """fp64 stays fp64 (for gradient checks); bf16, fp16 and fp32 are worked on in fp32."""
    return torch.float64 if logprobs.dtype == torch.float64 else torch.float32


def select(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype` where `mask`, else 0: what stands elsewhere, NaN too, reaches neither value nor gradient."""
    return torch.where(mask, values.to(dtype), 0.0)


def bound_logprobs(logprobs: Tensor) -> Tensor:
    """Logprobs whose differences have finite squares; what is held has no gradient.

    -inf becomes `LEAST_LOGPROB` and +inf 0, so that their KL pulls with a small force. Finite ones are held at +-4.6e18
    in fp32.
    """
    limit = torch.finfo(logprobs.dtype).max ** 0.5 / 4
    finite = torch.where(logprobs == -math.inf, LEAST_LOGPROB, torch.where(logprobs == math.inf, 0.0, logprobs))
    return finite.clamp(-limit, limit)


def importance_ratio(log_ratio: Tensor, cap: float = math.inf) -> Tensor:
    """exp(log_ratio), at most `cap` and the largest finite value; above either it is held and has no gradient."""
    return log_ratio.clamp(max=min(math.log(cap), _MAX_EXPONENT[log_ratio.dtype])).exp()


def prob_change(trainer_logprobs: Tensor, inference_logprobs: Tensor) -> Tensor:
    """exp(trainer) - exp(inference), in [-1, 1]: how far training moved the probability of the sampled token."""
    return trainer_logprobs.exp() - inference_logprobs.exp()


def policy_factor(advantages: Tensor, keep: Tensor, adv_tau: float) -> Tensor:
    """What DPPO (arXiv:2602.04879) puts on the ratio: -adv_tau * adv where the token is kept, else 0."""
    return torch.where(keep, -adv_tau * advantages, 0.0)


def has_teacher(ref_logprobs: Tensor) -> Tensor:
    """True where a teacher gave a number: finite, and not the 0.0 with which the wire fills the gaps."""
    return ref_logprobs.isfinite() & (ref_logprobs != 0.0)


def replay_factor(ref_logprobs: Tensor, trainer_logprobs: Tensor, keep: Tensor, tau: float, clip: float) -> Tensor:
    """What replay puts on the ratio: -tau * clip(ref - trainer, +-clip) where the token is kept, else 0.

    The sampled reverse-KL policy gradient of on-policy distillation, clipped per token.
    """
    gap = (torch.where(keep, ref_logprobs, 0.0) - trainer_logprobs).clamp(-clip, clip)
    return torch.where(keep, -tau * gap, 0.0)


def bounded(values: Tensor) -> Tensor:
    """`values` with what overflowed held at the largest finite number, which has no gradient."""
    limit = torch.finfo(values.dtype).max
    return values.clamp(-limit, limit)


def total(values: Tensor) -> Tensor:
    """0-dim sum in the dtype of `values`; added up in fp64, where large terms neither overflow nor drown small ones."""
    return totals(values)[0]


def totals(*values: Tensor) -> tuple[Tensor, ...]:
    """`total` of each of several tensors of one dtype."""
    limit = torch.finfo(values[0].dtype).max
    sums = torch.stack([one.sum(dtype=torch.float64) for one in values])
    return sums.clamp(-limit, limit).to(values[0].dtype).unbind()


def counts(*masks: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Number of True in each of several masks: 0-dim, in `dtype`."""
    return torch.stack([one.sum() for one in masks]).to(dtype).unbind()
