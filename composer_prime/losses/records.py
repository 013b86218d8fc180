"""What a loss takes and gives: PRIME-RL's two records in our own words, so that the loss needs no PRIME-RL.

A loss reads its inputs by field name, so any record with these names will do; what it returns is PRIME-RL's own
record when the caller is PRIME-RL, and ours otherwise.
"""

import sys
from dataclasses import dataclass

from torch import Tensor

_UPSTREAM = "prime_rl.trainer.rl.loss"


@dataclass(kw_only=True)
class LossInputs:
    """The tokens of one packed sequence; all of shape `(seq,)`.

    trainer_logprobs    float, nats: sampled tokens under the policy being trained; the gradient flows here
    inference_logprobs  float, nats: the same tokens under the policy that sampled them
    advantages          float
    loss_mask           bool: True where the token is trained on
    ref_logprobs        float, nats, or None: the same tokens under the teacher; 0.0, NaN and inf say "none here"
    loss_weights        float, or None for 1.0 everywhere

    Two more are read where they are, both float (seq, mask), nats: the tokens that sampling could have chosen.

    trainer_mask_logprobs    under the policy being trained; the gradient flows here too
    inference_mask_logprobs  under the policy that sampled; -inf in padding

    Source: `LossInputs` in PRIME-RL's trainer/rl/loss.py (versions before 0.7 call the teacher `teacher_logprobs`
    and have no weights).
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    ref_logprobs: Tensor | None = None
    loss_weights: Tensor | None = None
    trainer_mask_logprobs: Tensor | None = None
    inference_mask_logprobs: Tensor | None = None


@dataclass(kw_only=True)
class LossOutputs:
    """loss: 0-dim, the sum over tokens (the caller divides). metrics: 0-dim, detached, the same names on every call."""

    loss: Tensor
    metrics: dict[str, Tensor]


def outputs_record() -> type[LossOutputs]:
    """PRIME-RL's `LossOutputs` in a process where its loss module is loaded, else ours.

    Looked up, never imported: whoever calls us from PRIME-RL has loaded that module before ours.
    """
    return getattr(sys.modules.get(_UPSTREAM), "LossOutputs", LossOutputs)
