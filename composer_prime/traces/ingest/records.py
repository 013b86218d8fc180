"""A file's records: JSON values with the text that each was read from, so that what is kept can be given back verbatim.

A file is one JSON document, or one JSON value a line. Its bytes are decoded, cleared of secrets and parsed here; the
readers of the formats see values only.
"""

import codecs
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_prime.traces.ingest.secret_patterns import SecretCutter

MAX_DEPTH = 100
"""Levels of lists and objects in one record; sessions need a dozen, and JSON's own reader ends at a thousand."""

BLANK = "blank line"
MALFORMED = "malformed line"
TRUNCATED = "truncated last line"
NOT_UTF8 = "not UTF-8"
TOO_DEEP = "nested too deep"


@dataclass(frozen=True)
class Entry:
    """One JSON value of a file.

    text     as it stands in the file, without secrets, with the end of its line
    value    what it says; lone surrogates are replaced by U+FFFD
    problem  why there is no value; None: there is one
    """

    text: str
    value: Any
    problem: str | None = None


@dataclass(frozen=True)
class Part:
    """One file of a session: "" is the main one, others are named by their path below the session's folder."""

    name: str
    entries: tuple[Entry, ...]


def entries_of(data: bytes, secrets: SecretCutter) -> tuple[Entry, ...]:
    """The records of a file's bytes: one if they are one JSON value, else one a line, or one a value that runs on."""
    data = data.removeprefix(codecs.BOM_UTF8)
    values = _in_a_row(data)
    run_on = any(b"\n" in value.strip() for value in values) or any(b"\n" not in value for value in values[:-1])
    return tuple(_entry(value, secrets) for value in (values if len(values) == 1 or run_on else io.BytesIO(data)))


def _in_a_row(data: bytes) -> list[bytes]:
    """JSON values in a row, whatever space parts them; none if something else is there."""
    found: list[bytes] = []
    try:
        text = data.decode()
        at, start = 0, len(text) - len(text.lstrip())
        while start < len(text):
            start = json.JSONDecoder().raw_decode(text, start)[1]
            while start < len(text) and text[start].isspace():
                start += 1
            found.append(text[at:start].encode())
            at = start
    except (ValueError, RecursionError):
        return []
    return found


def _entry(line: bytes, secrets: SecretCutter) -> Entry:
    try:
        text = secrets.json(line.decode())
    except UnicodeDecodeError:
        return Entry("", None, NOT_UTF8)
    if not text.strip():
        return Entry(text, None, BLANK)
    try:
        return Entry(text, parse(text))
    except RecursionError:
        return Entry(text, None, TOO_DEEP)
    except ValueError:
        return Entry(text, None, MALFORMED if text.endswith("\n") else TRUNCATED)


def parse(text: str) -> Any:
    """A JSON value. Raises ValueError where it is none, RecursionError where it is nested deeper than MAX_DEPTH."""
    value = json.loads(text, parse_constant=lambda _: None)  # NaN and Infinity are no JSON
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise RecursionError
    return _whole(value) if "\\ud" in text or "\\uD" in text else value


def _is_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if levels == 0:
        return bool(inner)
    return any(isinstance(one, dict | list) and _is_deep(one, levels - 1) for one in inner)


def _whole(value: Any) -> Any:
    """The value with texts that UTF-8 can say."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_whole(name): _whole(inner) for name, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list) else value


def mapping(value: Any) -> Mapping[str, Any]:
    """An object's fields; none of anything else."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> Sequence[Any]:
    """A list's items; none of anything else."""
    return value if isinstance(value, list) else ()


def each(value: Any) -> Sequence[Any]:
    """A list's items; anything else as the only one."""
    return value if isinstance(value, list) else [value]


def string(value: Any) -> str:
    """A text; "" for anything else."""
    return value if isinstance(value, str) else ""


def name_or_none(*values: Any) -> str | None:
    """The first of the values that is a text and not empty."""
    return next((value for value in values if isinstance(value, str) and value), None)


def number_or_none(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


def objects(values: Iterable[Any]) -> list[Mapping[str, Any]]:
    """Those of the values that are objects."""
    return [value for value in values if isinstance(value, dict)]
