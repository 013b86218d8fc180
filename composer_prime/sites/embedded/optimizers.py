"""The inner optimizers: AdamW, or Muon for matrices and AdamW for the rest, as PRIME-RL's trainer/optim.py has it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from composer_prime.config.recipe import OptimConfig

_NO_MATRICES = ("embed_tokens", "lm_head")
"""Tables of rows that don't act as matrices: Muon leaves them to AdamW."""


class InnerOptimizer:
    """One or two of torch's optimizers, which share the parameters of a model, as one."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = tuple(parts)

    def step(self, lr: float) -> None:
        """Move the parameters by their gradients, with a learning rate."""
        for group in self._groups():
            group["lr"] = lr
        for part in self._parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; of AdamW alone it is torch's own."""
        if len(self._parts) == 1:
            return self._parts[0].state_dict()
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part, its in zip(self._parts, state.get("parts", [state]), strict=True):
            part.load_state_dict(dict(its))

    def _groups(self) -> Iterator[dict[str, Any]]:
        return chain.from_iterable(part.param_groups for part in self._parts)


def inner_optimizer(model: nn.Module, config: OptimConfig) -> InnerOptimizer:
    """The optimizer of a model's parameters that have gradients, as `[trainer.optim]` says.

    Muon (Jordan et al. 2024) orthogonalizes the momentum of each matrix, and its step is scaled to the size of one of
    AdamW's (Liu et al. 2025, 2502.16982), so that both take the same learning rates. Embeddings, the head, norms and
    biases are AdamW's.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in named if config.type == "muon" and _is_matrix(name, parameter)]
    taken = {id(parameter) for parameter in matrices}
    parts: list[Optimizer] = []
    if matrices:
        parts.append(
            torch.optim.Muon(
                matrices,
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=config.mu,
                nesterov=False,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    parts.append(
        torch.optim.AdamW(
            [parameter for _, parameter in named if id(parameter) not in taken],
            lr=config.lr,
            betas=(config.betas1, config.betas2),
            weight_decay=config.weight_decay,
            fused=True,
        )
    )
    return InnerOptimizer(parts)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and not any(part in name for part in _NO_MATRICES)
