"""The stand-in's side of the loss: upstream's two records, and the import by path."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class LossInputs:
    """One sequence, by upstream's names."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    """A token sum and metrics."""

    loss: Tensor
    metrics: dict[str, Tensor]


def setup_rl_loss_fn(import_path: str) -> Callable[[LossInputs], Any]:
    """The function that the path names."""
    module, _, name = import_path.rpartition(".")
    return getattr(importlib.import_module(module), name)
