"""How a trainer publishes its weights: one folder per policy version, seen whole or not at all.

broadcasts/step_N/{model.safetensors, STABLE}: N training steps are behind these weights. Made under another name and
renamed into place; the marker is for readers that, as PRIME-RL's, look for it. Where hints are read by an average of
the policies, that is ema/model.safetensors below it.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from composer_prime.config.paths import AVERAGE
from composer_prime.sites.embedded.whole_folder import numbered_steps, whole_folder

STABLE = "STABLE"
KEEP = 4
"""Broadcasts kept: a reader that was told of one may still be loading it two or three steps later."""


def publish(model: nn.Module, broadcasts: Path, version: int, average: dict[str, Tensor] | None = None) -> Path:
    """Put the weights of policy version `version` in place, drop all but the newest KEEP, and return the folder.

    average  as `weights` gives them, to go beside the model's

    Newer versions are dropped first: they are from before a resume that went back to this one. Raises SystemRefused
    when they can't be written.
    """
    folder = broadcasts / f"step_{version}"

    def drop_newer() -> None:
        for stale in [one for one in numbered_steps(broadcasts) if one > version]:
            shutil.rmtree(broadcasts / f"step_{stale}")

    values = weights(model)
    with whole_folder(folder, before=drop_newer) as making:
        _save(values, making)
        if average is not None:
            _save(average, making / AVERAGE)
        (making / STABLE).touch()
    for old in numbered_steps(broadcasts)[:-KEEP]:
        shutil.rmtree(broadcasts / f"step_{old}")
    return folder


def _save(values: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    on_cpu = {name: value.cpu() for name, value in values.items()}
    save_file(on_cpu, folder / "model.safetensors", metadata={"format": "pt"})


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and lasting buffers by name, fp32, where the model is; a tied one once, under its first
    name."""
    once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {
        name: (value.float() if value.is_floating_point() else value).contiguous()
        for name, value in model.state_dict().items()
        if name in once
    }


def load_weights(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy what `weights` gave into the model, in place."""
    with torch.no_grad():
        own = model.state_dict()
        for name, value in values.items():
            own[name].copy_(value)


def start_average(model: nn.Module) -> dict[str, Tensor]:
    """An average of one policy: the model's `weights`, as tensors of its own."""
    return {name: value.clone() for name, value in weights(model).items()}


@torch.no_grad()
def move_average(average: dict[str, Tensor], model: nn.Module, decay: float) -> None:
    """Take one more policy into an exponential moving average, in place: `decay` times itself, the rest the policy.

    average  as `start_average` gave it for this model, fp32. What isn't floating point becomes the model's.
    """
    for name, value in weights(model).items():
        if value.is_floating_point():
            average[name].lerp_(value, 1 - decay)
        else:
            average[name].copy_(value)
