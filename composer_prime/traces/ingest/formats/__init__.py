"""The formats that are read, and which of them a file is."""

from collections.abc import Sequence

from composer_prime.errors import BadInput
from composer_prime.traces.ingest.formats import (
    atif,
    chat,
    claude_code,
    codex,
    openenv,
    openhands,
    responses,
    swe_agent,
    verifiers,
)
from composer_prime.traces.ingest.reading import Reading
from composer_prime.traces.ingest.records import Entry, Part

READERS = (atif, openenv, verifiers, swe_agent, codex, claude_code, openhands, responses, chat)
"""From the most particular to the most general."""
FORMATS = {reader.NAME: reader for reader in READERS}
NUM_LOOKED_AT = 200
"""Records of a file that are looked at for its format; logs begin with lines that hold no message."""


def detect(entries: Sequence[Entry], name: str) -> str:
    """The format of a file's records. Raises BadInput, naming the nearest format and what the file lacks for it."""
    values = [entry.value for entry in entries if entry.problem is None][:NUM_LOOKED_AT]
    if not values:
        raise BadInput(f"{name} holds no JSON ({len(entries)} lines): give a whole file; is its beginning cut off?")
    for reader in READERS:
        if any(not reader.lacks(value) for value in values):
            return reader.NAME
    _, nearest, lacks = min(
        (
            (len(lacks) / len(reader.lacks(None)), reader.NAME, lacks)
            for reader in reversed(READERS)
            for lacks in map(reader.lacks, values)
        ),
        key=lambda found: found[0],
    )
    raise BadInput(
        f"{name} is of no known format: the nearest is {nearest}, and it lacks {', '.join(lacks)}; "
        f"give one of {', '.join(FORMATS)}"
    )


def check_known(format: str) -> None:
    """Raise BadInput for a format that isn't read."""
    if format not in FORMATS:
        raise BadInput(f"format {format!r} isn't known: give one of {', '.join(FORMATS)}")


def read(format: str, parts: Sequence[Part]) -> Reading:
    """What the files of a session say, in a known format."""
    return FORMATS[format].read(parts)
