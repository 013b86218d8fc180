"""Folders that are seen whole or not at all: written under a hidden name, then renamed into place."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from composer_prime.errors import SiteError


@contextlib.contextmanager
def whole_folder(place: Path, before: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """A new folder to write into, which is `place` once the block has ended; what was there is dropped then.

    before   called when the folder is complete, right before it gets its name

    What processes that died have left half written beside it goes first. Raises SiteError when it can't be written.
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
        free = shutil.disk_usage(place.parent).free
        raise SiteError(
            f"{place} can't be written, with {free / 1e6:.1f} MB free on its disk: free some space and start the site "
            f"with --resume; it goes on from its last checkpoint and its offers in the bucket "
            f"({str(error).splitlines()[0]})"
        ) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
