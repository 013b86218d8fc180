"""A trainer's own checkpoints: what it needs to go on as if it had never stopped.

checkpoints/step_N/state.pt, after N training steps, what the orchestrator needs of it, and their hashes; made under
another name and renamed into place. Read with `weights_only`, so it can hold tensors and plain data but no code.
"""

import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.sites.embedded.sound_steps import NUM_DRAWN, saved_steps
from composer_prime.sites.embedded.whole_folder import whole_folder
from composer_prime.sites.intact import SUMS, damage, seal

KEEP = 2
"""Checkpoints kept: the newest, and the one before for a newest that proves unreadable."""


def save_checkpoint(checkpoints: Path, step: int, state: dict[str, Any], num_drawn: int = 0) -> Path:
    """Write the state after `step` training steps, drop all but the newest KEEP, and return the folder.

    state  nested dicts and lists of tensors, numbers and strings; tensors are written from the CPU, so that any device
           can go on from them
    num_drawn  tasks that the orchestrator had drawn for these steps, which it asks for by `tasks_drawn`

    Raises SystemRefused when it can't be written; the checkpoints before stay.
    """
    folder = checkpoints / f"step_{step}"
    with whole_folder(folder) as making:
        torch.save(_on_cpu(state), making / "state.pt")
        (making / NUM_DRAWN).write_text(str(num_drawn))
        seal(making)
    for old in saved_steps(checkpoints)[:-KEEP]:
        shutil.rmtree(checkpoints / f"step_{old}")
    return folder


def newest_checkpoint(checkpoints: Path) -> dict[str, Any] | None:
    """The newest state, or None when there is none.

    Raises CorruptObject when it isn't what was written; a supervisor sets such a one aside before its trainer starts.
    """
    steps = saved_steps(checkpoints)
    if not steps:
        return None
    path = checkpoints / f"step_{steps[-1]}" / "state.pt"
    try:
        if (cause := damage(path.with_name(SUMS))) is None:
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        cause = str(error).splitlines()[0]
    raise CorruptObject(f"{path} can't be read ({cause}): delete {path.parent} to resume from the one before")


def _on_cpu(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_on_cpu(value) for value in state]
    return state.cpu() if isinstance(state, Tensor) else state
