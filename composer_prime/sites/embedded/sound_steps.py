"""Which of a trainer's checkpoints are there, and which of them are sound. No torch: all of a site's processes ask."""

import logging
import re
from pathlib import Path

from composer_prime.errors import CorruptObject
from composer_prime.sites.intact import SUMS, damage

DAMAGED = "damaged_"
"""How the name of a checkpoint begins that was set aside."""
NUM_DRAWN = "num_drawn"

logger = logging.getLogger(__name__)


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps there are checkpoints of, oldest first."""
    names = (re.fullmatch(r"step_(\d+)", one.name) for one in checkpoints.glob("step_*"))
    return sorted(int(name[1]) for name in names if name)


def tasks_drawn(checkpoints: Path, step: int) -> int:
    """How many tasks the site had drawn for the steps behind a checkpoint; 0 before the first."""
    if step == 0:
        return 0
    try:
        return int((checkpoints / f"step_{step}" / NUM_DRAWN).read_text())
    except FileNotFoundError:
        logger.warning("the checkpoint after step %d doesn't say which tasks were met: their order begins anew", step)
        return 0


def set_damaged_aside(checkpoints: Path) -> None:
    """Rename the checkpoints after the newest sound one: they aren't what was written.

    Raises CorruptObject, and renames none, when there are some and none is sound.
    """
    damaged: dict[Path, str] = {}
    for step in reversed(saved_steps(checkpoints)):
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
