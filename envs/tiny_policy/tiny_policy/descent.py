"""One step of supervised training, as every maker takes it, and the training that comes first: copying."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW
from transformers import PreTrainedModel

COPIED_ROWS, COPIED_TOKENS = 16, 16

Progress = Callable[[str], None]
"""Told how far it is, such as "step=15 accuracy=0.02", at every measurement."""


def adamw(model: PreTrainedModel, lr: float) -> AdamW:
    return AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def descend(model: PreTrainedModel, optimizer: AdamW, loss: Tensor) -> None:
    """Move the model's weights one step down the loss, in place."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def learn_to_copy(model: PreTrainedModel, seed: int, *, steps: int, lr: float, ramp_steps: int = 20) -> None:
    """Train on random tokens said twice. Conversations alone teach copying late, or by some seeds not at all."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = adamw(model, lr)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / ramp_steps, 1.0))
    model.train()
    for _ in range(steps):
        said = torch.randint(model.config.vocab_size, (COPIED_ROWS, COPIED_TOKENS), generator=generator)
        said = said.to(model.device)
        logits = model(input_ids=said.repeat(1, 2), use_cache=False).logits[:, COPIED_TOKENS - 1 : -1]
        descend(model, optimizer, functional.cross_entropy(logits.flatten(0, 1), said.flatten()))
        ramp.step()
