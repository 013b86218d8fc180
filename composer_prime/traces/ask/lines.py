"""JSON lines that outlive a kill at any byte: appended whole and synced; a torn last line never happened."""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with their places in bytes, oldest first; none where there is no file.

    Raises BadInput on a damaged line.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        place = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise BadInput(
                    f"{path} line {number} isn't a JSON object: restore the file, or answer into another folder"
                )
            yield place, found
            place += len(line)


def read_line(path: Path, place: int) -> dict[str, Any]:
    """The object at a place that `read_lines` or `write` gave."""
    with path.open("rb") as file:
        file.seek(place)
        return json.loads(file.readline())


class LineWriter:
    """Appends to one file, which no other process writes. `close` it in the end."""

    def __init__(self, path: Path) -> None:
        is_new = not path.exists()
        self.path = path
        self._file = path.open("ab+", buffering=0)
        self._size = self._cut_torn_line()
        self._one_sync = asyncio.Lock()
        self._next_sync: asyncio.Future[None] | None = None
        if is_new:
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

    def write(self, record: Mapping[str, Any]) -> int:
        """Write one line, which a kill of this process can't take back, and return its place."""
        line = memoryview(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        place, self._size = self._size, self._size + len(line)
        while line:
            line = line[self._file.write(line) :]
        return place

    async def synced(self) -> None:
        """Return when all that is written is on the disk. Callers share one sync: each takes longer than a line."""
        if self._next_sync is None:
            self._next_sync = asyncio.ensure_future(self._sync())
        await asyncio.shield(self._next_sync)

    async def _sync(self) -> None:
        async with self._one_sync:
            self._next_sync = None  # what is written from here on waits for the next one
            await asyncio.to_thread(os.fsync, self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _cut_torn_line(self) -> int:
        """Cut off what follows the last whole line; the file's bytes after it."""
        end = size = self._file.seek(0, os.SEEK_END)
        tail = b""
        while b"\n" not in tail and end:
            start = max(end - 2**20, 0)
            self._file.seek(start)
            tail, end = self._file.read(end - start), start
        size = end + tail.rfind(b"\n") + 1
        self._file.truncate(size)
        return size
