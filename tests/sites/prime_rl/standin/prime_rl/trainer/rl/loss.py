"""The stand-in's side of the loss, as upstream has it after `default` was removed: records, losses as objects, import.

The losses are ours, written from their definitions; what counts is who makes and calls them, and with what.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from prime_rl.configs.trainer import (
    CISPOLossConfig,
    CustomLossConfig,
    IcePopLossConfig,
    IPOLossConfig,
    LossConfig,
    PPOLossConfig,
)
from torch import Tensor


@dataclass
class LossInputs:
    """One sequence, by upstream's names; the last two are [seq, mask], of all ids that sampling could have chosen."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None
    trainer_mask_logprobs: Tensor | None = None
    inference_mask_logprobs: Tensor | None = None


@dataclass
class LossOutputs:
    """A token sum and metrics."""

    loss: Tensor
    metrics: dict[str, Tensor]


class OwnLoss:
    """One of upstream's own: minus advantage times a factor that each kind has from the ratio."""

    def __init__(self, config: Any, factor: Callable[[Any, Tensor, LossInputs], Tensor]) -> None:
        self.config, self.factor = config, factor

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Summed over the trained tokens, each with its weight."""
        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
        values = -self.config.adv_tau * inputs.advantages * self.factor(self.config, ratio, inputs) * inputs.loss_mask
        if inputs.loss_weights is not None:
            values = values * inputs.loss_weights
        if getattr(self.config, "score_centering", False) and inputs.trainer_mask_logprobs is not None:
            values = values + inputs.advantages * inputs.trainer_mask_logprobs.sum(-1) * inputs.loss_mask
        return LossOutputs(loss=values.sum(), metrics={"ratio": ratio.detach().mean()})


def ipo(config: IPOLossConfig, ratio: Tensor, inputs: LossInputs) -> Tensor:
    """The ratio, where the probability has moved by `eps` at most."""
    moved = (inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()).abs()
    return torch.where(moved.detach() <= config.eps, ratio.clamp(max=config.max_importance_ratio), 0.0)


def icepop(config: IcePopLossConfig, ratio: Tensor, inputs: LossInputs) -> Tensor:
    """The ratio, inside the band."""
    kept = (ratio >= config.ratio_low) & (ratio <= config.ratio_high)
    return torch.where(kept, ratio, 0.0)


def ppo(config: PPOLossConfig, ratio: Tensor, inputs: LossInputs) -> Tensor:
    """The smaller gain of the ratio and the clipped one."""
    clipped = ratio.clamp(config.ratio_low, config.ratio_high)
    return torch.where(inputs.advantages > 0, torch.minimum(ratio, clipped), torch.maximum(ratio, clipped))


def cispo(config: CISPOLossConfig, ratio: Tensor, inputs: LossInputs) -> Tensor:
    """The log-probability, weighted by the clipped ratio."""
    return ratio.detach().clamp(config.ratio_low, config.ratio_high) * inputs.trainer_logprobs


class CustomLoss:
    """The function that the path names."""

    def __init__(self, config: CustomLossConfig) -> None:
        module, _, name = config.import_path.rpartition(".")
        self.config, self.function = config, getattr(importlib.import_module(module), name)

    def loss(self, inputs: LossInputs) -> Any:
        """Called with its settings."""
        return self.function(inputs, **self.config.kwargs)


def setup_rl_loss_fn(config: LossConfig) -> Any:  # pyright: ignore[reportInvalidTypeForm]
    """The loss that the trainer calls as `.loss(inputs)`."""
    if isinstance(config, CustomLossConfig):
        return CustomLoss(config)
    return OwnLoss(config, {"ipo": ipo, "icepop": icepop, "ppo": ppo, "cispo": cispo}[config.type])


def compute_loss(streams: list[LossInputs], rl_loss_fn: Any, rl_scale: float) -> Tensor:
    """All sequences of a micro batch."""
    return torch.stack([rl_loss_fn.loss(inputs).loss for inputs in streams]).sum() / rl_scale
