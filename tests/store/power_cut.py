"""What a power cut would leave of a folder: the names that were synced, of files whose bytes were synced before."""

import os
from pathlib import Path

import pytest


class Disk:
    """Follows each fsync of this process, to say what is on the disk and not only in the system's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._names: dict[Path, set[tuple[str, int]]] = {}
        self._bytes: set[tuple[int, int]] = set()
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._follow)

    def has(self, path: Path, below: Path) -> bool:
        """True when `path` outlasts a power cut with its bytes; the folder `below` was there before."""
        found = path.stat()
        if (found.st_ino, found.st_size) not in self._bytes:
            return False
        while path != below:
            if (path.name, path.stat().st_ino) not in self._names.get(path.parent, set()):
                return False
            path = path.parent
        return True

    def _follow(self, descriptor: int) -> None:
        self._fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self._names[path] = {(each.name, each.stat().st_ino) for each in path.iterdir()}
        else:
            status = os.fstat(descriptor)
            self._bytes.add((status.st_ino, status.st_size))
