"""The one loss of composer-prime: DPPO policy gradient, a KL leash, and teacher replay, on sampled tokens.

In PRIME-RL it is the default of `composer_prime.sites.prime_rl.outer.loss`, which alone makes a trainer a site of an
outer run; the embedded trainer calls it. It needs torch alone.
At replay weight 0 it is PRIME-RL's DPPO+KL (`type = "default"`, 0.7 and 0.8), to rounding, wherever that one is finite:
the same keyword arguments with the same defaults and bounds, and metrics of the same names and definitions.

For each token:

    log_ir = trainer - inference;  ir = exp(log_ir), at most ratio_cap;  moved = exp(trainer) - exp(inference)
    policy = -keep * adv_tau * adv * ir, or for cispo -loss_mask * adv_tau * adv * clipped.detach() * trainer
    kl     = kl_tau * loss_mask * log_ir**2
    replay = -replay_tau * has_teacher * keep_r * clip(ref - trainer, +-replay_clip).detach() * ir
    ref_kl = -ref_kl_tau * has_teacher * keep_r * (ref - trainer).detach() * ir

    keep is loss_mask and
      dppo    not (moved > dppo_mask_high if adv > 0 else moved < -dppo_mask_low)
      ipo     |moved| <= ipo_threshold
      icepop  ratio_low <= exp(log_ir) <= ratio_high
      cispo   nothing more: clipped is exp(log_ir) held from ratio_low to ratio_high, whatever ratio_cap
    keep_r is keeps_low: loss_mask and not moved < -dppo_mask_low; with ipo and icepop keep as well

Stale data. -inf stands for a log-probability of -104, what fp32 rounds to 0, and gives itself no gradient.

Overflow. What stands on tokens outside `loss_mask` reaches neither value nor gradient, NaN and infinities included,
and a token that a term's region drops adds nothing to that term, whatever its ratio. On a token that is kept, a
ratio above ratio_cap, or one (or its product with the advantage) beyond the working dtype, is held and gives no
gradient, so that only the KL term, which stays finite too, pulls such a token back. NaN on a kept token stays NaN:
it is a bug.

Context parallelism. The loss and the sums among the metrics (`*_loss`, `num_teacher_tokens`) of the shards of a
sequence add up to those of the whole, and so do gradients: no token looks at another. Means are over the tokens
that were passed; weight them by their denominators to combine them. PRIME-RL (0.7 and 0.8) gathers the logprobs of
all shards before it calls the loss, so there each rank sees whole sequences.
"""

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_prime.errors import ConfigError
from composer_prime.losses import terms, trust_regions
from composer_prime.losses.records import LossInputs, LossOutputs, outputs_record
from composer_prime.losses.trust_regions import TrustRegion, keeps_low

__all__ = ["composer_loss", "keeps_low", "replay_loss"]

_Outputs = outputs_record()

_TRUST_REGION = "dppo_mask_low and dppo_mask_high, which bound how far a probability moves"
_IPO = 'ipo_threshold with trust_region = "ipo"'
_REPLACED = {
    "teacher_tau": "replay_tau",
    **dict.fromkeys(("ipo_mask_low", "ipo_mask_high"), _TRUST_REGION),
    "eps": _IPO,
    "max_importance_ratio": "ratio_cap",
    **dict.fromkeys(
        ("ratio_type", "token_mask_low", "token_mask_high", "geo_mask_low", "geo_mask_high"), _TRUST_REGION
    ),
    **dict.fromkeys(("sequence_mask_low", "sequence_mask_high", "sequence_clip_high"), _TRUST_REGION),
}
"""What to use for the settings of PRIME-RL's other and older losses (0.4 and later)."""


def composer_loss(
    inputs: LossInputs,
    *,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
    replay_tau: float = 0.0,
    replay_clip: float = 5.0,
    ref_kl_tau: float = 0.0,
    ratio_cap: float = 20.0,
    trust_region: TrustRegion = "dppo",
    ipo_threshold: float = 0.1,
    ratio_low: float | None = None,
    ratio_high: float = 5.0,
    score_centering: bool = False,
    **unknown: object,
) -> LossOutputs:
    """Sum over the tokens of one packed sequence of `weight * (policy + kl + replay + ref_kl)`; the caller divides.

    inputs          see `LossInputs`; any shape that all share. fp64 is worked on in fp64, anything else in fp32.
                    `ref_logprobs` (or `teacher_logprobs`) and `loss_weights` may be None or absent.
    dppo_mask_low   largest fall and
    dppo_mask_high  largest rise of a token's probability that is still learned from
    adv_tau         scale of the advantages
    kl_tau          weight of the squared log ratio
    replay_tau      weight of the teacher; a token takes part where the teacher's number is finite and not 0.0
    replay_clip     nats; bound on the teacher's pull on one token
    ref_kl_tau      weight of the KL to a frozen reference: PRIME-RL's ref_kl, replay without a clip. It reads the same
                    logprobs as replay, so one of the two must be 0
    ratio_cap       at least 1. A ratio above it is held there and gives no gradient; below, nothing changes. It acts on
                    policy, replay and ref_kl, never on kl; `math.inf` gives upstream's ratio (0.7 and 0.8)
    trust_region    which tokens the policy term keeps; PRIME-RL's of that name
    ratio_low       from 0; None: 0.2 for icepop, no bound for cispo
    score_centering for ipo: subtracts the sampler's expected score, see `trust_regions.centering`; nothing where the
                    record lacks `trainer_mask_logprobs` and `inference_mask_logprobs`

    Raises ConfigError for an argument it doesn't know or a negative one, with what to use in its place.

    Returns the loss (0-dim, attached to the graph even when nothing is trained on) and 0-dim detached metrics, the
    same names on every call. The gradient flows to `trainer_logprobs` alone; nothing is changed in place.

    Source: DPPO arXiv:2602.04879, KL arXiv:2602.02276; `default_loss_fn` and `ref_kl_loss_fn` in PRIME-RL's
    trainer/rl/loss.py (0.7 and 0.8). The other regions: see `trust_regions`.
    """
    if unknown:
        raise _refusal(unknown)
    _refuse_negative(dppo_mask_low, dppo_mask_high, adv_tau, kl_tau, replay_tau, replay_clip, ref_kl_tau, ipo_threshold)
    trust_regions.check_region(trust_region, ratio_low, ratio_high, ratio_cap, score_centering)
    _refuse_both(replay_tau, ref_kl_tau)
    tokens = _read_tokens(inputs)
    region = _Region(trust_region, dppo_mask_low, dppo_mask_high, ipo_threshold, ratio_low, ratio_high)
    log_ratio = tokens.trainer_logprobs - tokens.inference_logprobs
    ratio = terms.importance_ratio(log_ratio, ratio_cap)
    keep, keep_replay = region.keeps(tokens, log_ratio)
    taught = keep_replay & tokens.has_teacher
    squared = log_ratio.square()
    with torch.no_grad():
        policy = tokens.weights * terms.policy_factor(tokens.advantages, keep, adv_tau)
        pulls = [
            tokens.weights * terms.replay_factor(tokens.ref_logprobs, tokens.trainer_logprobs, taught, tau, clip)
            for tau, clip in ((replay_tau, replay_clip), (ref_kl_tau, math.inf))
        ]
        kl = tokens.weights * kl_tau
    score = ratio
    if trust_region == "cispo":
        score = trust_regions.cispo_weight(log_ratio, ratio_low, ratio_high) * tokens.trainer_logprobs
    centered = torch.zeros_like(ratio)
    if score_centering:
        centered = adv_tau * tokens.weights * tokens.advantages * _centering(inputs, tokens, ipo_threshold, ratio_cap)
    acting = terms.bounded(policy * score) + terms.bounded((pulls[0] + pulls[1]) * ratio)
    loss = terms.total(terms.bounded(acting) + kl * squared + centered)
    with torch.no_grad():
        parts = (terms.bounded(policy * score) + centered, kl * squared, *(terms.bounded(one * ratio) for one in pulls))
        names = ("policy_loss", "kl_loss", "replay_loss", "ref_kl_loss")
        metrics = dict(zip(names, terms.totals(*parts), strict=True))
        metrics |= _trust_region_metrics(tokens, keep, terms.importance_ratio(log_ratio) - log_ratio - 1)
        capped, num_mask = terms.counts(tokens.mask & (log_ratio > math.log(ratio_cap)), tokens.mask, dtype=ratio.dtype)
        metrics["is_capped"] = capped / num_mask.clamp(min=1)
    return _Outputs(loss=loss, metrics=metrics)


def replay_loss(
    inputs: LossInputs,
    *,
    replay_tau: float,
    replay_clip: float = 5.0,
    dppo_mask_low: float = 0.2,
    ratio_cap: float = 20.0,
) -> LossOutputs:
    """The replay term of `composer_loss` alone, weighted and summed, to be added to another loss's sum.

    Arguments, dtypes and metrics as there, with the region of dppo. Raises ConfigError for a bad argument as there.
    """
    _refuse_negative(replay_tau, replay_clip, dppo_mask_low)
    trust_regions.check_region("dppo", None, math.inf, ratio_cap, False)
    tokens = _read_tokens(inputs)
    keep = keeps_low(tokens.trainer_logprobs, tokens.inference_logprobs, tokens.mask, dppo_mask_low)
    ratio = terms.importance_ratio(tokens.trainer_logprobs - tokens.inference_logprobs, ratio_cap)
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


def _refuse_both(replay_tau: float, ref_kl_tau: float) -> None:
    if replay_tau and ref_kl_tau:
        raise ConfigError(
            f"trainer.loss.kwargs has replay_tau ({replay_tau}) and ref_kl_tau ({ref_kl_tau}), which read the same "
            "logprobs: set one of them to 0"
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


@dataclass(frozen=True)
class _Region:
    """A trust region with its bounds, by the names of `composer_loss`."""

    name: TrustRegion
    dppo_mask_low: float
    dppo_mask_high: float
    ipo_threshold: float
    ratio_low: float | None
    ratio_high: float

    def keeps(self, tokens: _Tokens, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens the policy term keeps, and which replay and ref_kl keep."""
        pair = tokens.trainer_logprobs, tokens.inference_logprobs
        keep_low = keeps_low(*pair, tokens.mask, self.dppo_mask_low)
        if self.name == "ipo":
            keep = trust_regions.keeps_ipo(*pair, tokens.mask, self.ipo_threshold)
            return keep, keep & keep_low
        if self.name == "icepop":
            low = trust_regions.ICEPOP_LOW if self.ratio_low is None else self.ratio_low
            keep = trust_regions.keeps_icepop(log_ratio, tokens.mask, low, self.ratio_high)
            return keep, keep & keep_low
        if self.name == "cispo":
            return tokens.mask, keep_low
        bounds = self.dppo_mask_low, self.dppo_mask_high
        return trust_regions.keeps_dppo(*pair, tokens.advantages, tokens.mask, *bounds), keep_low


def _centering(inputs: LossInputs, tokens: _Tokens, threshold: float, cap: float) -> Tensor:
    """What the policy's score is centred by; 0 where the record lacks the logprobs of the sampling mask."""
    trainer = getattr(inputs, "trainer_mask_logprobs", None)
    sampler = getattr(inputs, "inference_mask_logprobs", None)
    if trainer is None or sampler is None:
        return torch.zeros_like(tokens.trainer_logprobs)
    return trust_regions.centering(trainer, sampler, tokens.mask, threshold, cap)


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
