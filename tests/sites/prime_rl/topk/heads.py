"""Heads that make logits as upstream's do, in plain torch, of any dtype; they are known by their names."""

import torch
from torch import Tensor, nn


class VanillaOutputLinear(nn.Linear):
    """Full logits; softcap None: plain."""

    softcap: float | None = None

    def forward(self, hidden_states: Tensor, labels: Tensor, temperature: Tensor) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """logits: (1, n, V), before the temperature"""
        return {"logits": self.capped(hidden_states)}

    def capped(self, hidden_states: Tensor) -> Tensor:
        """The logits before the temperature."""
        logits = super().forward(hidden_states)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class FusedOutputLinear(VanillaOutputLinear):
    """The labels' log-probabilities alone."""

    def forward(self, hidden_states: Tensor, labels: Tensor, temperature: Tensor) -> dict[str, Tensor]:
        """logprobs: (1, n)"""
        logprobs = (self.capped(hidden_states) / temperature.unsqueeze(-1)).log_softmax(-1)
        return {"logprobs": logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)}
