"""Files for this user alone: a run's folder holds what agents said and what their tools answered.

A process that writes one calls `keep_private`; what is for others, a bucket's objects, keeps the user's own umask.
"""

import os

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
