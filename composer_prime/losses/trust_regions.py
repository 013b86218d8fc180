"""Trust regions: which tokens a policy-gradient term learns from, and how much, when the sampler lags behind.

Each is PRIME-RL's of that name, by its names for the bounds. All take and give tensors of one shape, without gradient.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from composer_prime.errors import ConfigError
from composer_prime.losses import terms

TrustRegion = Literal["dppo", "ipo", "icepop", "cispo"]

ICEPOP_LOW = 0.2
"""IcePop's `ratio_low` where none is given; CISPO's is none."""


@torch.no_grad()
def keeps_low(trainer_logprobs: Tensor, inference_logprobs: Tensor, loss_mask: Tensor, low: float) -> Tensor:
    """bool: tokens of `loss_mask` whose probability didn't fall by more than `low`; the region of replay.

    trainer_logprobs, inference_logprobs  float, any shape, nats; any values outside `loss_mask`
    loss_mask                             bool, same shape
    low                                   from 0; `math.inf` keeps all

    Source: the region of `ref_kl_loss_fn` in PRIME-RL's trainer/rl/loss.py, where low is 0.2.
    """
    return loss_mask.bool() & ~(terms.prob_change(trainer_logprobs, inference_logprobs) < -low)


@torch.no_grad()
def keeps_dppo(
    trainer_logprobs: Tensor, inference_logprobs: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float
) -> Tensor:
    """bool: a rise of at most `high` where the advantage is positive, elsewhere a fall of at most `low`.

    Source: DPPO arXiv:2602.04879, `default_loss_fn` of PRIME-RL 0.7 and 0.8.
    """
    below_high = mask & ~(terms.prob_change(trainer_logprobs, inference_logprobs) > high)
    return torch.where(advantages > 0, below_high, keeps_low(trainer_logprobs, inference_logprobs, mask, low))


@torch.no_grad()
def keeps_ipo(trainer_logprobs: Tensor, inference_logprobs: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """bool: a probability that moved by at most `threshold`, up or down.

    Source: `ipo_loss_fn` of PRIME-RL 0.7 and 0.8; later versions call the bound `eps`, and it is 0.3.
    """
    return mask & ~(terms.prob_change(trainer_logprobs, inference_logprobs).abs() > threshold)


@torch.no_grad()
def keeps_icepop(log_ratio: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """bool: a ratio from `low` to `high`. Source: `IcePopLoss` of PRIME-RL after 0.8."""
    return mask & ~((log_ratio < _log(low)) | (log_ratio > _log(high)))


@torch.no_grad()
def cispo_weight(log_ratio: Tensor, low: float | None, high: float) -> Tensor:
    """The ratio clipped to [low, high]: CISPO's weight on the logprob. Source: `CISPOLoss` of PRIME-RL after 0.8."""
    return log_ratio.clamp(min=_log(low or 0.0), max=_log(high)).exp()


def centering(
    trainer_mask_logprobs: Tensor, inference_mask_logprobs: Tensor, mask: Tensor, threshold: float, cap: float
) -> Tensor:
    """Sum at each token of q(v) * ratio(v) * log p(v) over the tokens v that could have been sampled there.

    Added once per advantage, it takes the sampler's expected score out of the policy term. A token v takes part where
    its probability moved by at most `threshold` and its ratio is at most `cap`, as in the policy term.

    trainer_mask_logprobs    float (n, m), nats: log p, with gradient; any value in padding
    inference_mask_logprobs  float (n, m), nats: log q; -inf in padding
    mask                     bool (n,); other rows give 0, whatever stands there

    Source: score centering arXiv:2609.20807, `IPOLoss.score_centering_loss` of PRIME-RL after 0.8 (there a ratio above
    the cap counts as the cap).
    """
    dtype = terms.working_dtype(trainer_mask_logprobs)
    valid = mask[:, None] & inference_mask_logprobs.isfinite()
    trainer = terms.bound_logprobs(terms.select(trainer_mask_logprobs, valid, dtype))
    with torch.no_grad():
        sampler = terms.select(inference_mask_logprobs, valid, dtype)
        inside = keeps_ipo(trainer, sampler, valid, threshold) & ~(trainer - sampler > _log(cap))
        weight = torch.where(inside, trainer.exp(), 0.0)  # q * ratio is p
    return (weight * trainer).sum(-1)


def check_region(region: str, ratio_low: float | None, ratio_high: float, ratio_cap: float, centered: bool) -> None:
    """Raises ConfigError for a region that there isn't, or for bounds that leave nothing."""
    if region not in TrustRegion.__args__:
        raise ConfigError(
            f"trainer.loss.kwargs.trust_region ({region!r}) is none of {', '.join(TrustRegion.__args__)}: choose one"
        )
    if not ratio_cap >= 1:
        raise ConfigError(f"trainer.loss.kwargs.ratio_cap ({ratio_cap}) must be at least 1: raise it, or use inf")
    low = ICEPOP_LOW if ratio_low is None else ratio_low
    if ratio_low is not None and (ratio_low < 0 or (ratio_low == 0 and region == "icepop")):
        raise ConfigError(f"trainer.loss.kwargs.ratio_low ({ratio_low}) must be above 0: raise it, or leave it out")
    if not ratio_high > 0 or (low > ratio_high and (ratio_low is not None or region == "icepop")):
        raise ConfigError(
            f"trainer.loss.kwargs.ratio_high ({ratio_high}) must be above 0 and at least ratio_low ({low}): raise it"
        )
    if centered and region != "ipo":
        raise ConfigError(
            f"trainer.loss.kwargs.score_centering needs trust_region ipo, and it is {region}: set it, or drop centering"
        )


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
