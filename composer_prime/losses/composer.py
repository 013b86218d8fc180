"""The one loss of composer-prime: DPPO policy gradient, a KL leash, and teacher replay, on sampled tokens.

In PRIME-RL it is the default of `composer_prime.sites.prime_rl.outer.loss`, which alone makes a trainer a site of an
outer run; the embedded trainer calls it. It needs torch alone.
At replay weight 0 it is PRIME-RL's DPPO+KL (`type = "default"`, 0.7 and 0.8), to rounding, wherever that one is finite:
the same keyword arguments with the same defaults and bounds, and metrics of the same names and definitions.
"""

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_prime.errors import ConfigError
from composer_prime.losses import terms
from composer_prime.losses.records import LossInputs, LossOutputs, outputs_record

_Outputs = outputs_record()

_TRUST_REGION = "dppo_mask_low and dppo_mask_high, which bound how far a probability moves"
_REPLACED = {
    "teacher_tau": "replay_tau",
    **dict.fromkeys(("ipo_threshold", "ipo_mask_low", "ipo_mask_high"), _TRUST_REGION),
    **dict.fromkeys(
        ("ratio_type", "token_mask_low", "token_mask_high", "geo_mask_low", "geo_mask_high"), _TRUST_REGION
    ),
    **dict.fromkeys(("sequence_mask_low", "sequence_mask_high", "sequence_clip_high"), _TRUST_REGION),
}
"""What to use for the settings of PRIME-RL's other and older losses (0.4 to 0.8)."""


def composer_loss(
    inputs: LossInputs,
    *,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
    replay_tau: float = 0.0,
    replay_clip: float = 5.0,
    **unknown: object,
) -> LossOutputs:
    """Sum over the tokens of one packed sequence of `weight * (policy + kl + replay)`; the caller divides.

        log_ir = trainer - inference;  ir = exp(log_ir);  moved = exp(trainer) - exp(inference)
        keep   = loss_mask and not (moved > dppo_mask_high if adv > 0 else moved < -dppo_mask_low)
        keep_r = loss_mask and not moved < -dppo_mask_low
        policy = -keep * adv_tau * adv * ir
        kl     = kl_tau * loss_mask * log_ir**2
        replay = -replay_tau * has_teacher * keep_r * clip(ref - trainer, +-replay_clip).detach() * ir

    inputs          see `LossInputs`; any shape that all share. fp64 is worked on in fp64, anything else in fp32.
                    `ref_logprobs` (or `teacher_logprobs`) and `loss_weights` may be None or absent.
    dppo_mask_low   largest fall and
    dppo_mask_high  largest rise of a token's probability that is still learned from
    adv_tau         scale of the advantages
    kl_tau          weight of the squared log ratio
    replay_tau      weight of the teacher; a token takes part where the teacher's number is finite and not 0.0
    replay_clip     nats; bound on the teacher's pull on one token

    Raises ConfigError for an argument it doesn't know or a negative one, with what to use in its place.

    Returns the loss (0-dim, attached to the graph even when nothing is trained on) and 0-dim detached metrics, the
    same names on every call. The gradient flows to `trainer_logprobs` alone; nothing is changed in place.

    Overflow. What stands on tokens outside `loss_mask` reaches neither value nor gradient, NaN and infinities included,
    and a token that a trust region drops adds nothing whatever its ratio. On a token that is kept, a ratio (or its
    product with the advantage) beyond the working dtype is held at the largest finite number and gives no gradient, so
    that only the KL term, which stays finite too, pulls such a token back. NaN on a kept token stays NaN: it is a bug.

    Context parallelism. The loss and the sums among the metrics (`*_loss`, `num_teacher_tokens`) of the shards of a
    sequence add up to those of the whole, and so do gradients: no token looks at another. Means are over the tokens
    that were passed; weight them by their denominators to combine them. PRIME-RL (0.7 and 0.8) gathers the logprobs of
    all shards before it calls the loss, so there each rank sees whole sequences.

    Not read: `trainer_mask_logprobs` and `inference_mask_logprobs` of PRIME-RL after 0.8, the logprobs of all tokens
    that sampling could have chosen. Upstream's own loss centres its scores by them, this one doesn't.

    Source: DPPO arXiv:2602.04879, KL arXiv:2602.02276, `default_loss_fn` in PRIME-RL's trainer/rl/loss.py.
    """
    if unknown:
        raise _refusal(unknown)
    _refuse_negative(dppo_mask_low, dppo_mask_high, adv_tau, kl_tau, replay_tau, replay_clip)
    tokens = _read_tokens(inputs)
    keep, keep_replay = _trust_region(tokens, dppo_mask_low, dppo_mask_high)
    log_ratio = tokens.trainer_logprobs - tokens.inference_logprobs
    ratio = terms.importance_ratio(log_ratio)
    squared = log_ratio.square()
    with torch.no_grad():
        policy = tokens.weights * terms.policy_factor(tokens.advantages, keep, adv_tau)
        replay = tokens.weights * terms.replay_factor(
            tokens.ref_logprobs, tokens.trainer_logprobs, keep_replay & tokens.has_teacher, replay_tau, replay_clip
        )
        kl = tokens.weights * kl_tau
    loss = terms.total(terms.bounded((policy + replay) * ratio) + kl * squared)
    with torch.no_grad():
        sums = terms.totals(terms.bounded(policy * ratio), kl * squared, terms.bounded(replay * ratio))
        metrics = dict(zip(("policy_loss", "kl_loss", "replay_loss"), sums, strict=True))
        metrics |= _trust_region_metrics(tokens, keep, ratio - log_ratio - 1)
    return _Outputs(loss=loss, metrics=metrics)


def replay_loss(
    inputs: LossInputs, *, replay_tau: float, replay_clip: float = 5.0, dppo_mask_low: float = 0.2
) -> LossOutputs:
    """The replay term of `composer_loss` alone, weighted and summed, to be added to another loss's sum.

    Arguments, dtypes and metrics as there. Raises ConfigError for a negative argument.
    """
    _refuse_negative(replay_tau, replay_clip, dppo_mask_low)
    tokens = _read_tokens(inputs)
    _, keep = _trust_region(tokens, dppo_mask_low, math.inf)
    ratio = terms.importance_ratio(tokens.trainer_logprobs - tokens.inference_logprobs)
    with torch.no_grad():
        factor = tokens.weights * terms.replay_factor(
            tokens.ref_logprobs, tokens.trainer_logprobs, keep & tokens.has_teacher, replay_tau, replay_clip
        )
        (num_teacher_tokens,) = terms.counts(tokens.has_teacher, dtype=ratio.dtype)
    loss = terms.total(terms.bounded(factor * ratio))
    return _Outputs(loss=loss, metrics={"replay_loss": loss.detach(), "num_teacher_tokens": num_teacher_tokens})


composer_loss.__dict__["__signature__"] = inspect.Signature(
    [one for name, one in inspect.signature(composer_loss).parameters.items() if name != "unknown"]
)
"""For those who check arguments before they call: the unknown ones are taken only to be refused with a remedy."""


def _refusal(unknown: Iterable[str]) -> ConfigError:
    name = next(iter(unknown))
    takes = ", ".join(one for one in inspect.signature(composer_loss).parameters if one != "inputs")
    instead = f"use {_REPLACED[name]}" if name in _REPLACED else "leave it out"
    return ConfigError(
        f"trainer.loss.kwargs has {name}, which composer_loss doesn't know: {instead} (it takes {takes})"
    )


def _refuse_negative(*values: float) -> None:
    if min(values) < 0:
        raise ConfigError(
            f"trainer.loss.kwargs has {min(values)}, the least that composer_loss takes is 0: turn a term off with 0"
        )


@dataclass(frozen=True)
class _Tokens:
    """The inputs in the working dtype, 0 outside `loss_mask`; only `trainer_logprobs` has a gradient."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    ref_logprobs: Tensor
    has_teacher: Tensor


def _read_tokens(inputs: LossInputs) -> _Tokens:
    """Reads optional fields by `getattr`: which of them a record has depends on the PRIME-RL version."""
    mask = inputs.loss_mask.bool()
    dtype = terms.working_dtype(inputs.trainer_logprobs)
    trainer_logprobs = terms.bound_logprobs(terms.select(inputs.trainer_logprobs, mask, dtype))
    with torch.no_grad():
        ref_logprobs = getattr(inputs, "ref_logprobs", None)
        if ref_logprobs is None:
            ref_logprobs = getattr(inputs, "teacher_logprobs", None)
        weights = getattr(inputs, "loss_weights", None)
        ref_logprobs = torch.zeros_like(trainer_logprobs) if ref_logprobs is None else ref_logprobs.to(dtype)
        return _Tokens(
            trainer_logprobs=trainer_logprobs,
            inference_logprobs=terms.bound_logprobs(terms.select(inputs.inference_logprobs, mask, dtype)),
            advantages=terms.select(inputs.advantages, mask, dtype),
            mask=mask,
            weights=mask.to(dtype) if weights is None else terms.select(weights, mask, dtype),
            ref_logprobs=ref_logprobs,
            has_teacher=mask & terms.has_teacher(ref_logprobs),
        )


def _trust_region(tokens: _Tokens, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Which tokens the policy term keeps, and which the replay term keeps. A zero advantage meets the low bound."""
    with torch.no_grad():
        moved = terms.prob_change(tokens.trainer_logprobs, tokens.inference_logprobs)
        above_low = tokens.mask & ~(moved < -low)
        below_high = tokens.mask & ~(moved > high)
        return torch.where(tokens.advantages > 0, below_high, above_low), above_low


def _trust_region_metrics(tokens: _Tokens, keep: Tensor, mismatch_kl: Tensor) -> dict[str, Tensor]:
    """Means of `mismatch_kl` = ir - log_ir - 1 and shares of tokens, by PRIME-RL's names and definitions.

    The first six are over the trained tokens (masked: those the policy term drops), the two `masked_advantage_*` over
    the dropped ones; a mean over no token is 0.
    """
    mask, dropped = tokens.mask, tokens.mask & ~keep
    low, high = dropped & (tokens.advantages < 0), dropped & (tokens.advantages > 0)
    counts = terms.counts(mask, keep, dropped, low, high, tokens.has_teacher, dtype=mismatch_kl.dtype)
    num_mask, num_keep, num_dropped = torch.stack(counts[:3]).clamp(min=1).unbind()
    _, _, masked, masked_low, masked_high, num_teacher_tokens = counts
    over_all, over_kept, over_dropped = terms.totals(mismatch_kl, mismatch_kl * keep, mismatch_kl * dropped)
    return {
        "mismatch_kl": over_all / num_mask,
        "masked_mismatch_kl": over_dropped / num_dropped,
        "unmasked_mismatch_kl": over_kept / num_keep,
        "is_masked": masked / num_mask,
        "is_masked_low": masked_low / num_mask,
        "is_masked_high": masked_high / num_mask,
        "masked_advantage_positive": masked_high / num_dropped,
        "masked_advantage_negative": masked_low / num_dropped,
        "num_teacher_tokens": num_teacher_tokens,
    }
