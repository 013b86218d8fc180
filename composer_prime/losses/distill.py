"""Distillation of whole distributions: a divergence between teacher and policy at each token.

Both are compared on the teacher's candidates and one tail, which holds all other tokens. A candidate that the teacher
gives is a probability to match; nothing is renormalised, and the tail keeps the policy from hiding mass elsewhere.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_prime.config.distill import LEAST_TAIL, Divergence
from composer_prime.errors import ConfigError
from composer_prime.losses import terms
from composer_prime.losses.records import LossOutputs, outputs_record

_Outputs = outputs_record()

_NOTHING = -1e4
"""Log-probability of an empty slot: its exp is 0, and differences of two of them are 0 rather than NaN."""

_MOST = math.log1p(-LEAST_TAIL)


@dataclass(kw_only=True)
class DistillInputs:
    """n tokens of a batch with k candidates each.

    student_logprobs  float (n, k), nats: the policy at the teacher's candidates; the gradient flows here. Any value in
                      empty slots
    teacher_logprobs  float (n, k), nats, at temperature 1; -inf in empty slots
    mask              bool (n,): tokens that the term acts on
    weights           float (n,), or None for 1.0 everywhere
    """

    student_logprobs: Tensor
    teacher_logprobs: Tensor
    mask: Tensor
    weights: Tensor | None = None


def distill_loss(
    inputs: DistillInputs,
    *,
    tau: float,
    divergence: Divergence = "forward_kl",
    jsd_alpha: float = 0.5,
    taid_t: float | None = None,
    entropy_threshold: float = 0.8,
) -> LossOutputs:
    """tau * sum over masked tokens of weight * divergence; the caller divides.

    With t the teacher and s the policy, each over {candidates, tail}, in nats:

        forward_kl     KL(t || s)
        reverse_kl     KL(s || t)
        jsd            (1 - a) KL(s || m) + a KL(t || m), m = (1 - a) s + a t, a = jsd_alpha
        taid           KL(q || s), q = softmax((1 - taid_t) log s.detach() + taid_t log t)
        entropy_aware  KL(s || t), plus KL(t || s) where the entropy of t is above entropy_threshold

    tau                weight of the term; at 0 the loss is exactly 0 and so is its gradient
    jsd_alpha          the teacher's share of the mixture, between 0 and 1
    taid_t             the teacher's share of TAID's target, 0 to 1; see `losses.taid`
    entropy_threshold  nats

    Worked on in fp64; the loss has the working dtype of the inputs. Returns it (0-dim, attached) and metrics (0-dim,
    detached, the same names every call): `loss`, `num_tokens`, and unweighted sums over masked tokens of
    `teacher_entropy` and `student_entropy` (nats, over the support), `overlap` (sum of min(t, s)), `student_tail`.

    A tail's probability is at least `LEAST_TAIL`, where it gives no gradient. A log-probability of the policy below
    `terms.LEAST_LOGPROB` is held there and gives no gradient. So values and gradients are finite for any log-probs that
    aren't NaN. Unmasked tokens and empty slots reach neither; NaN in a filled slot of a masked token stays NaN.

    Raises ConfigError for a setting outside its bounds, or "taid" without taid_t.

    Source: JSD as in OPSD and SDPO, TAID arXiv:2501.16937, entropy-aware arXiv:2603.07079 (equation 9 with alpha 1 and
    threshold 0.8;
    the paper samples its reverse KL and takes entropy over the vocabulary, here both are over the support).
    """
    _check(tau, divergence, jsd_alpha, taid_t, entropy_threshold)
    mask = inputs.mask.bool()
    student, teacher = _supports(inputs, mask)
    dtype = terms.working_dtype(inputs.student_logprobs)
    weights = mask.double() if inputs.weights is None else terms.select(inputs.weights.detach(), mask, torch.float64)
    if tau == 0:
        loss = terms.total(inputs.student_logprobs[:0].to(dtype))
    else:
        per_token = _diverge(student, teacher, divergence, jsd_alpha, taid_t, entropy_threshold)
        loss = (tau * terms.total(weights * per_token)).to(dtype)
    with torch.no_grad():
        per_token = torch.stack(
            [
                _entropy(teacher),
                _entropy(student),
                torch.minimum(student, teacher).exp().sum(-1),
                student[:, -1].exp(),
            ]
        )
        sums = terms.select(per_token, mask, torch.float64).sum(-1).to(dtype)
        metrics = dict(zip(("teacher_entropy", "student_entropy", "overlap", "student_tail"), sums, strict=True))
        metrics |= {"loss": loss.detach(), "num_tokens": mask.sum().to(dtype)}
    return _Outputs(loss=loss, metrics=metrics)


def _check(tau: float, divergence: str, jsd_alpha: float, taid_t: float | None, entropy_threshold: float) -> None:
    if not 0 <= tau < math.inf:
        raise ConfigError(f"tau ({tau}) must be a finite number from 0: 0 turns the term off")
    if divergence not in Divergence.__args__:
        raise ConfigError(f"divergence ({divergence!r}) must be one of {', '.join(Divergence.__args__)}: choose one")
    if not 0 < jsd_alpha < 1:
        raise ConfigError(f"jsd_alpha ({jsd_alpha}) must lie between 0 and 1: at the ends use forward_kl or reverse_kl")
    if divergence == "taid" and (taid_t is None or not 0 <= taid_t <= 1):
        raise ConfigError(f"taid_t ({taid_t}) must be a number from 0 to 1: pass TaidSchedule.t")
    if not entropy_threshold >= 0:
        raise ConfigError(f"entropy_threshold ({entropy_threshold}) must be at least 0 nats: 0 always adds forward KL")


def _supports(inputs: DistillInputs, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs fp64 (n, k + 1) of policy and teacher, the tail last. Where nothing is given, both are all tail."""
    filled = mask[:, None] & (inputs.teacher_logprobs != -math.inf)
    student = inputs.student_logprobs.double().clamp(min=terms.LEAST_LOGPROB)
    teacher = inputs.teacher_logprobs.detach().double()
    return _with_tail(torch.where(filled, student, _NOTHING)), _with_tail(torch.where(filled, teacher, _NOTHING))


def _with_tail(logprobs: Tensor) -> Tensor:
    """Appends log(1 - sum of probabilities); sums that rounding brings near or above 1 leave `LEAST_TAIL`."""
    if logprobs.shape[-1] == 0:
        return logprobs.sum(-1, keepdim=True)  # zeros, attached
    mass = logprobs.logsumexp(-1, keepdim=True).clamp(max=_MOST)
    return torch.cat([logprobs, torch.log(-torch.expm1(mass))], dim=-1)


def _diverge(
    student: Tensor, teacher: Tensor, divergence: Divergence, alpha: float, taid_t: float | None, threshold: float
) -> Tensor:
    """Divergence at each token: fp64 (n,)."""
    if divergence == "forward_kl":
        return _kl(teacher, student)
    if divergence == "reverse_kl":
        return _kl(student, teacher)
    if divergence == "jsd":
        mixture = torch.logaddexp(student + math.log1p(-alpha), teacher + math.log(alpha))
        return (1 - alpha) * _kl(student, mixture) + alpha * _kl(teacher, mixture)
    if divergence == "taid":
        assert taid_t is not None
        target = ((1 - taid_t) * student.detach() + taid_t * teacher).log_softmax(-1)
        return _kl(target, student)
    uncertain = _entropy(teacher) > threshold
    return _kl(student, teacher) + torch.where(uncertain, _kl(teacher, student), 0.0)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def _entropy(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)
