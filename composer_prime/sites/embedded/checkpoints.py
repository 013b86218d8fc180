"""A trainer's own checkpoints: what it needs to go on as if it had never stopped.

checkpoints/step_N/state.pt, after N training steps, what the orchestrator needs of it, and their hashes; made under
another name and renamed into place. Read with `weights_only`, so it can hold tensors and plain data but no code. All
of a site's processes ask which there are, so torch is imported only to write and read them.
"""

import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

from composer_prime.errors import CorruptObject
from composer_prime.sites.embedded.whole_folder import numbered_steps, whole_folder
from composer_prime.sites.intact import SUMS, damage, seal

DAMAGED = "damaged_"
"""How the name of a checkpoint begins that was set aside."""
NUM_DRAWN = "num_drawn"
KEEP = 2
"""Checkpoints kept: the newest, and the one before for a newest that proves unreadable."""

logger = logging.getLogger(__name__)


def save_checkpoint(checkpoints: Path, step: int, state: dict[str, Any], num_drawn: int = 0) -> Path:
    """Write the state after `step` training steps, drop all but the newest KEEP, and return the folder.

    state  nested dicts and lists of tensors, numbers and strings; tensors are written from the CPU, so that any device
           can go on from them
    num_drawn  tasks that the orchestrator had drawn for these steps, which it asks for by `tasks_drawn`

    Raises SystemRefused when it can't be written; the checkpoints before stay.
    """
    import torch

    folder = checkpoints / f"step_{step}"
    with whole_folder(folder) as making:
        torch.save(_on_cpu(state), making / "state.pt")
        (making / NUM_DRAWN).write_text(str(num_drawn))
        seal(making)
    for old in numbered_steps(checkpoints)[:-KEEP]:
        shutil.rmtree(checkpoints / f"step_{old}")
    return folder


def newest_checkpoint(checkpoints: Path) -> dict[str, Any] | None:
    """The newest state, or None when there is none.

    Raises CorruptObject when it isn't what was written; a supervisor sets such a one aside before its trainer starts.
    """
    steps = numbered_steps(checkpoints)
    if not steps:
        return None
    import torch

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
    return state.cpu() if hasattr(state, "cpu") else state


def tasks_drawn(checkpoints: Path, step: int) -> int:
    """How many tasks the site had drawn for the steps behind a checkpoint; 0 before the first."""
    return int((checkpoints / f"step_{step}" / NUM_DRAWN).read_text()) if step else 0


def set_damaged_aside(checkpoints: Path) -> None:
    """Rename the checkpoints after the newest sound one: they aren't what was written.

    Raises CorruptObject, and renames none, when there are some and none is sound.
    """
    damaged: dict[Path, str] = {}
    for step in reversed(numbered_steps(checkpoints)):
        folder = checkpoints / f"step_{step}"
        if (cause := damage(folder / SUMS)) is None:
            break
        damaged[folder] = cause
    else:
        if damaged:
            raise CorruptObject(
                f"none of the checkpoints in {checkpoints} is what was written ({next(iter(damaged.values()))}): put a "
                "sound copy of one back, or start the site from its beginning with --clean"
            )
    for folder, cause in damaged.items():
        folder.rename(folder.with_name(f"{DAMAGED}{folder.name}"))
        logger.warning("checkpoint %s is damaged (%s): set aside, the one before it is taken", folder, cause)
