"""What a storm's processes tell each other on disk: a site's orders, and the book of what it did. No torch here."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STORE_DOWN = 3
"""Exit code of a site that couldn't reach the store when it started: start it again."""
TAIL_BYTES = 4096


@dataclass(frozen=True)
class StormSiteConfig:
    """All that a site needs to know.

    folder       its own: checkpoint, journal, book and log
    environment  variables that lead to its gate
    numel        fp32 values of the whole model, spread over the run's fragments
    step_s       one inner step, seconds
    step_tokens  tokens that count as trained in one
    checkpoint_steps   inner steps between two checkpoints
    """

    site: str
    folder: str
    uri: str
    environment: Mapping[str, str]
    terms: Mapping[str, Any]
    numel: int
    step_s: float
    step_tokens: int
    checkpoint_steps: int

    def write(self, path: Path) -> None:
        """Store it where `read` finds it."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "StormSiteConfig":
        """What `write` stored."""
        return cls(**json.loads(path.read_text()))


class Book:
    """What a site did: JSON lines with the time on the machine's monotonic clock, which all its processes share."""

    def __init__(self, folder: Path) -> None:
        self._file = _place(folder).open("a", buffering=1)

    def write(self, event: str, **fields: Any) -> None:
        """Add one line; it outlives the process."""
        line = {"event": event, "t": round(time.monotonic(), 3), "pid": os.getpid(), **fields}
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def read_book(folder: Path) -> list[dict[str, Any]]:
    """The lines of a site's book in order; one that a kill cut short is left out."""
    path = _place(folder)
    return _parsed(path.read_bytes()) if path.exists() else []


def newest_versions(folder: Path) -> list[int]:
    """The open round of each fragment, as the book last says; none before the site joined."""
    path = _place(folder)
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = _parsed(file.read())
    return next((line["versions"] for line in reversed(lines) if "versions" in line), [])


def has_merged(folder: Path, pid: int) -> bool:
    """Whether tokens of a site were merged since its process `pid` joined."""
    stands = [sum(line["merged"]) for line in read_book(folder) if line["pid"] == pid and "merged" in line]
    return bool(stands) and stands[-1] > stands[0]


def _parsed(data: bytes) -> list[dict[str, Any]]:
    lines = []
    for line in data.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict)]


def _place(folder: Path) -> Path:
    return folder / "book.jsonl"
