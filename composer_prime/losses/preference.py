"""Losses on pairs of answers: of two to the same prompt, the chosen one is to become likelier against the rejected.

DPO measures both against a frozen reference, SimPO by their mean log-probability and without one. Both read summed
log-probabilities, so they need no more than a forward pass gives, and work on PRIME-RL's wire, too: see
`pair_advantages`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_prime.errors import ConfigError
from composer_prime.losses import terms


@dataclass(frozen=True, kw_only=True)
class PreferenceOutputs:
    """What a loss on n pairs gives.

    losses   (n,), attached, weighted; the caller reduces
    margins  (n,), detached: what the sigmoid is of, as `pair_advantages` takes it
    metrics  0-dim, detached, the same names on every call, means over the pairs whatever their weights and 0 without
             pairs: `accuracy`, the share of pairs whose chosen reward is the larger, and `margin`, by how much. For DPO
             a reward is beta * (policy - reference), for SimPO beta * policy / length
    """

    losses: Tensor
    margins: Tensor
    metrics: dict[str, Tensor]


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    weights: Tensor | None = None,
    sft_tau: float = 0.0,
    chosen_lengths: Tensor | None = None,
) -> PreferenceOutputs:
    """weights * (-log sigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))) + sft_tau * NLL).

    chosen, rejected          float (pairs,), nats: log-probabilities of the two answers under the policy, each summed
                              over its tokens; the gradient flows here
    ref_chosen, ref_rejected  the same under the reference
    beta                      above 0: how far the policy may leave the reference; the smaller, the farther
    weights                   float (pairs,), or None for 1.0 everywhere
    sft_tau                   from 0: weight of the chosen answer's NLL a token, -chosen / chosen_lengths
    chosen_lengths            (pairs,), tokens; needed with sft_tau

    fp64 is worked on in fp64, anything else in fp32. Raises ConfigError for a setting outside its bounds, or sft_tau
    without lengths.

    Source: arXiv:2305.18290, equation 7; the NLL term as in arXiv:2404.19733 (with weight alpha).
    """
    _check(beta, sft_tau, chosen_lengths)
    chosen, rejected, weights = _read(chosen, rejected, weights)
    ref_chosen, ref_rejected = (one.detach().to(chosen.dtype) for one in (ref_chosen, ref_rejected))
    reward_gap = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    return _outputs(reward_gap, reward_gap, weights, _nll(chosen, chosen_lengths, sft_tau))


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    weights: Tensor | None = None,
    sft_tau: float = 0.0,
) -> PreferenceOutputs:
    """weights * (-log sigmoid(beta * (chosen / chosen_lengths - rejected / rejected_lengths) - gamma) + sft_tau * NLL).

    gamma   from 0: the reward by which the chosen answer is to lead; TRL's simpo_gamma

    The rest as in `dpo_loss`; lengths are at least 1.

    Source: arXiv:2405.14734.
    """
    _check(beta, sft_tau, chosen_lengths)
    if gamma < 0:
        raise ConfigError(f"gamma ({gamma}) must be at least 0: 0 turns the target margin off")
    chosen, rejected, weights = _read(chosen, rejected, weights)
    reward_gap = beta * (chosen / chosen_lengths - rejected / rejected_lengths)
    return _outputs(reward_gap, reward_gap - gamma, weights, _nll(chosen, chosen_lengths, sft_tau))


def pair_advantages(margins: Tensor, beta: float, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The advantages of a pair's chosen and rejected answer under which a policy gradient is DPO's own.

    margins  (pairs,), DPO's at the policy that scores: beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    weights  float (pairs,), or None for 1.0 everywhere

    Returns two detached tensors (pairs,): +-weights * beta * sigmoid(-margins), for every token of the answer. With
    them `composer_loss`, at inference_logprobs = trainer_logprobs and summed over both, has the gradient of the sum of
    `dpo_loss`, because the gradient of its ratio there is that of the log-probability.
    """
    advantages = beta * torch.sigmoid(-margins.detach())
    if weights is not None:
        advantages = advantages * weights.detach()
    return advantages, -advantages


def _check(beta: float, sft_tau: float, chosen_lengths: Tensor | None) -> None:
    if not beta > 0:
        raise ConfigError(f"beta ({beta}) must be above 0: at 0 a pair teaches nothing")
    if sft_tau < 0:
        raise ConfigError(f"sft_tau ({sft_tau}) must be at least 0: 0 turns the term off")
    if sft_tau and chosen_lengths is None:
        raise ConfigError(f"sft_tau ({sft_tau}) is a weight a token: give chosen_lengths, or set it to 0")


def _read(chosen: Tensor, rejected: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    dtype = terms.working_dtype(chosen)
    chosen, rejected = chosen.to(dtype), rejected.to(dtype)
    return chosen, rejected, torch.ones_like(chosen) if weights is None else weights.detach().to(dtype)


def _nll(chosen: Tensor, lengths: Tensor | None, sft_tau: float) -> Tensor:
    return -sft_tau * chosen / lengths if sft_tau and lengths is not None else torch.zeros_like(chosen)


def _outputs(reward_gap: Tensor, margins: Tensor, weights: Tensor, nll: Tensor) -> PreferenceOutputs:
    with torch.no_grad():
        num_pairs = max(reward_gap.numel(), 1)
        metrics = {
            "accuracy": (reward_gap > 0).sum().to(reward_gap.dtype) / num_pairs,
            "margin": reward_gap.sum() / num_pairs,
        }
    losses = weights * (nll - F.logsigmoid(margins))
    return PreferenceOutputs(losses=losses, margins=margins.detach(), metrics=metrics)
