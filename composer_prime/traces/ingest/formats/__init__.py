"""The formats that are read, and which of them a file is."""

from collections.abc import Sequence

from composer_prime.errors import BadInput
from composer_prime.traces.ingest.formats import (
    api_log,
    atif,
    chat,
    claude_code,
    codex,
    langfuse,
    langsmith,
    opencode,
    openhands,
    openhands_v1,
    otel,
    qwen_code,
    responses,
    stream_json,
    swe_agent,
    verifiers,
)
from composer_prime.traces.ingest.records import Entry

_MODULES = (api_log, atif, claude_code, codex, langfuse, langsmith, opencode, openhands, openhands_v1, otel, qwen_code,
            responses, stream_json, swe_agent, verifiers)  # fmt: skip
FORMATS = {format.name: format for format in (chat.CHAT, chat.BLOCKS, *(module.FORMAT for module in _MODULES))}
NUM_LOOKED_AT = 200
"""Records of a file that are looked at for its format; logs begin with lines that hold no message."""


def detect(entries: Sequence[Entry], name: str) -> str:
    """The format of a file's records. Raises BadInput, naming the nearest format and what the file lacks for it."""
    values = [entry.value for entry in entries if entry.problem is None][:NUM_LOOKED_AT]
    if not values:
        raise BadInput(f"{name} holds no line of JSON: give a whole file; is its beginning cut off?")
    lacks = {name: min(map(format.lacks, values), key=len) for name, format in FORMATS.items()}
    claimed = [name for name, lacking in lacks.items() if not lacking]
    if len(claimed) == 1:
        return claimed[0]
    if claimed:
        raise BadInput(f"{name} has the marks of {' and of '.join(claimed)}: say which by --format")
    nearest = min(FORMATS, key=lambda name: len(lacks[name]) / len(FORMATS[name].lacks(None)))
    raise BadInput(
        f"{name} is of no known format: the nearest is {nearest}, and it lacks {', '.join(lacks[nearest])}. "
        "If it is a log, open an issue with a few lines of it, their texts replaced"
    )


def check_known(format: str) -> None:
    """Raise BadInput for a format that isn't read."""
    if format not in FORMATS:
        raise BadInput(f"format {format!r} isn't known: give one of {', '.join(FORMATS)}")
