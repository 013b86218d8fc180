"""Reads new weights for a model that is already there, and copies them in without moving a tensor.

Everything is checked before the first value is written, so that a bad folder leaves the old policy whole.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from composer_prime.errors import BadInput


def read_weights(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `*.safetensors` in that folder, by the model's names, checked against it.

    A tied parameter may be there under one of its names or under all. Raises BadInput naming what doesn't fit.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInput(f"weight_dir ({folder}) holds no *.safetensors file: give the folder that the trainer published")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise BadInput(f"weights in {file} can't be read: {error}; publish them again") from error
    expected = model.state_dict()
    once = {name for name, _ in model.named_parameters()}
    _refuse(folder, "lacks", sorted(once - weights.keys()))
    _refuse(folder, "has what the model doesn't have:", sorted(weights.keys() - expected.keys()))
    _refuse(
        folder,
        "has another shape for",
        [
            f"{name} ({tuple(value.shape)}, model: {tuple(expected[name].shape)})"
            for name, value in weights.items()
            if value.shape != expected[name].shape
        ],
    )
    _refuse(
        folder,
        "has values that aren't finite in",
        [name for name, value in weights.items() if value.is_floating_point() and not bool(value.isfinite().all())],
    )
    return weights


@torch.no_grad()
def copy_weights(weights: dict[str, Tensor], model: nn.Module) -> None:
    """Write checked weights into the model's own tensors, in its own dtype."""
    own = model.state_dict()
    for name, value in weights.items():
        own[name].copy_(value)


def _refuse(folder: Path, fault: str, names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise BadInput(f"weight_dir ({folder}) {fault} {shown}: give weights of the model that is served")
