"""The gateway's audit log: one JSON line for every request, whatever became of it.

A line never holds a signature, a nonce or a presigned URL: those are secrets for as long as they last.
"""

import threading
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Literal, TextIO

from composer_prime.visible import json_text

Verdict = Literal["allowed", "missing", "refused", "failed"]
MAX_TEXT = 512
"""Characters kept of an operation, a key or a reason: what a stranger sends doesn't fill the disk."""


@dataclass
class Entry:
    """What one line says."""

    request: str
    """Drawn for this request; the answer's x-request-id header names it too."""
    site: str = ""
    """'' until its signature was found good."""
    operation: str = ""
    key: str = ""
    nbytes: int = 0
    """Of the object written, or read through the gateway."""
    verdict: Verdict = "failed"
    status: int = 500
    """499: the sender hung up."""
    why: str = ""


class Audit:
    """Appends lines to a text stream. Thread-safe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, entry: Entry) -> None:
        """Write one line, to its end. Raises OSError when the stream doesn't take it."""
        values = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **asdict(entry)}
        values |= {name: values[name][:MAX_TEXT] for name in ("operation", "key", "why")}
        with self._lock:
            self._stream.write(json_text(values) + "\n")
            self._stream.flush()
