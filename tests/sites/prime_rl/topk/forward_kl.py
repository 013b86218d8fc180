"""A forward KL on candidates and tail, from its definition: a reference, and a stand-in where a test needs one."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

LEAST_TAIL = 1e-7


@dataclass(kw_only=True)
class DistillInputs:
    """As `composer_prime.losses.distill.DistillInputs`."""

    student_logprobs: Tensor
    teacher_logprobs: Tensor
    mask: Tensor
    weights: Tensor


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """(n,), nats: sum over the slots and the tail of p_teacher (log p_teacher - log p_student); -inf fills no slot."""
    filled = teacher > -torch.inf
    p = torch.where(filled, teacher, 0.0).exp() * filled
    slots = (p * (torch.where(filled, teacher, 0.0) - torch.where(filled, student, 0.0))).sum(-1)
    tail = (1 - p.sum(-1)).clamp(min=LEAST_TAIL)
    student_tail = (1 - (torch.where(filled, student, 0.0).exp() * filled).sum(-1)).clamp(min=LEAST_TAIL)
    return slots + tail * (tail.log() - student_tail.log())


def distill_loss(inputs: DistillInputs, *, tau: float, **settings: Any) -> SimpleNamespace:
    """As `composer_prime.losses.distill.distill_loss` has it for "forward_kl"."""
    assert settings.get("divergence", "forward_kl") == "forward_kl"
    each = forward_kl(inputs.student_logprobs, inputs.teacher_logprobs)
    total = tau * (each * inputs.mask * inputs.weights).sum()
    return SimpleNamespace(loss=total, metrics={"loss/distill_kl": each.detach().mean()})
