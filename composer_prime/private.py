"""Files for this user alone: a run's folder holds what agents said and what their tools answered.

A process that writes one calls `keep_private`; what is for others, a bucket's objects, keeps the user's own umask.
What must outlast a power cut has its folder made by `make_folder` and its name confirmed by `sync_folder`.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_UMASK = "COMPOSER_PRIME_UMASK"
"""The umask before, for this process and its children."""


def keep_private() -> None:
    """From now on this process and its children make files 0600 and folders 0700."""
    os.environ.setdefault(_UMASK, f"{os.umask(0o077):o}")
    os.umask(0o077)


def users_umask() -> int:
    """The umask that was in force before `keep_private`; -1: it is still."""
    return int(os.environ.get(_UMASK, "-1"), 8)


def share(path: str | int, mode: int) -> None:
    """Give a file or folder that was made just now the mode that it would have had before `keep_private`."""
    if (umask := users_umask()) >= 0:
        os.chmod(path, mode & ~umask)


def sync_folder(folder: str | Path) -> None:
    """Return once the names in a folder are on the disk; at once where the system can't sync folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def make_folder(
    folder: str | Path, share: Callable[[str, int], object] = lambda path, mode: None, top: str = ""
) -> None:
    """Make a folder, and those above it as far as `top`, whose names outlast a power cut; `share` is told of each."""
    if os.path.isdir(folder) or folder == top:
        return
    above = os.path.dirname(os.path.abspath(folder))
    make_folder(above, share, top)
    with suppress(FileExistsError):
        os.mkdir(folder)
        share(str(folder), 0o777)
    sync_folder(above)
