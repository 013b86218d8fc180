"""Folders that are seen whole or not at all: written under a hidden name, then renamed into place."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from composer_prime.errors import SystemRefused


@contextlib.contextmanager
def whole_folder(place: Path, before: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """A new folder to write into, which is `place` once the block has ended; what was there is dropped then.

    before   called when the folder is complete, right before it gets its name

    What processes that died have left half written beside it goes first. Raises SystemRefused when it can't be written.
    """
    making = place.parent / f".{place.name}.{os.getpid()}"
    try:
        for left in place.parent.glob(".step_*"):
            shutil.rmtree(left)
        making.mkdir(parents=True)
        yield making
        before()
        shutil.rmtree(place, ignore_errors=True)
        making.rename(place)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch tells of a full disk by a RuntimeError of its own
        there = next(above for above in place.parents if above.exists())
        raise SystemRefused(
            f"{place} can't be written ({str(error).splitlines()[0]}), with {shutil.disk_usage(there).free / 1e6:.1f} "
            "MB free on its disk: free some space, or raise the limit that is named, and start the site with --resume; "
            "it goes on from its last checkpoint and its offers in the bucket"
        ) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def numbered_steps(folder: Path) -> list[int]:
    """The N of the folders step_N that stand in a folder, in order; half written ones have other names."""
    names = (re.fullmatch(r"step_(\d+)", one.name) for one in folder.glob("step_*"))
    return sorted(int(name[1]) for name in names if name)
