"""Writes a recipe as TOML, which the standard library can only read; and reads what others wrote.

Keys of a table come before its subtables, so that the text reads back to the same data.
"""

import json
import tomllib
from collections.abc import Iterator
from typing import Any

MOST_DOTS = 200
"""In a line of TOML that somebody else wrote: reading a key takes the square of its parts, 16 s for 32,000."""


def read_toml(text: str) -> dict[str, Any]:
    """The data that somebody else's TOML spells. Raises ValueError, too, where it would take long to read."""
    if max(line.count(".") for line in text.split("\n")) > MOST_DOTS:
        raise ValueError(f"a line has more than {MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("tables or lists are nested too deep") from None


def to_toml(data: dict[str, Any]) -> str:
    """The data (JSON types without null) as TOML text; reading it gives equal data."""
    return "\n".join(_table(data, ())).strip() + "\n"


def _table(data: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    for key, value in data.items():
        if not _is_table(value) and not _is_tables(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in data.items():
        name = ".".join(map(_key, (*path, key)))
        if _is_table(value):
            if not value or any(not _is_table(item) and not _is_tables(item) for item in value.values()):
                yield f"\n[{name}]"
            yield from _table(value, (*path, key))
        elif _is_tables(value):
            for item in value:
                yield f"\n[[{name}]]"
                yield from _table(item, (*path, key))


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_table, value))


def _key(key: str) -> str:
    return key if key and all(char.isascii() and (char.isalnum() or char in "-_") for char in key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
