"""JSON lines that outlive a kill at any byte: appended whole and synced; a torn last line never happened."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, oldest first; none where there is no file. Raises BadInput on a damaged line."""
    try:
        *whole, _torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for number, line in enumerate(whole, start=1):
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise BadInput(f"{path} line {number} isn't a JSON object: restore the file, or answer into another folder")
        yield found


class LineWriter:
    """Appends to one file, which no other process writes. `close` it in the end."""

    def __init__(self, path: Path) -> None:
        is_new = not path.exists()
        self._file = path.open("ab+", buffering=0)
        self._cut_torn_line()
        if is_new:
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

    def append(self, record: dict[str, Any]) -> None:
        """Write one line; it is on the disk when this returns."""
        line = memoryview(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        while line:
            line = line[self._file.write(line) :]
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _cut_torn_line(self) -> None:
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)
