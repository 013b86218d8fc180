"""Where what a site downloads goes: below the volunteer's folder, so that one limit of disk counts all of it.

Who has set a place for the hub's files keeps it, and is told that the limit doesn't count what lies there.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from composer_prime.volunteers.invitation import restored

HUB_PLACES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")
"""Variables of huggingface_hub that say where weights go; the first that is set counts."""
CACHE = "cache"


def cache_variables(root: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a site's processes are told, so that they keep what they fetch and build below `root`.

    The hub's token stays where it is: it is the volunteer's, and no file of the run's.
    """
    found = {"XDG_CACHE_HOME": str(root / CACHE)}
    if _hub_place(environ) is not None:
        return found
    before = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    found["HF_HOME"] = str(root / CACHE / "huggingface")
    if not environ.get("HF_TOKEN_PATH"):
        found["HF_TOKEN_PATH"] = str(before / "token")
    return found


def elsewhere(root: Path, environ: Mapping[str, str] = os.environ) -> str | None:
    """What the volunteer should know where weights go to a place of their own; None where they go below `root`."""
    name = _hub_place(environ)
    if name is None:
        return None
    place = Path(environ[name]).expanduser().absolute()
    if place.is_relative_to(root.absolute()):
        return None
    return (
        f"Weights of the hub go to {place}, since {name} says so here: --max-disk-gib doesn't count them; unset it and "
        f"they go below {root}."
    )


@contextmanager
def kept_below(root: Path) -> Iterator[None]:
    """Let this process, and those it starts meanwhile, keep what they fetch and build below `root`."""
    changes = cache_variables(root)
    with restored(changes):
        os.environ.update(changes)
        yield


def _hub_place(environ: Mapping[str, str]) -> str | None:
    return next((name for name in HUB_PLACES if environ.get(name)), None)
