"""Qwen Code's sessions: JSON lines whose messages have Gemini's parts. Each names the line before it; records are lines.

A line that comes again under its uuid adds to the message. A compression's history replaces what was there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.formats.parts import either_message
from composer_prime.traces.ingest.reading import Reading, parents_first, read_log
from composer_prime.traces.ingest.records import Part, mapping, name_or_none, sequence
from composer_prime.traces.ingest.session import Draft

NAME = "qwen-code"
NO_MESSAGE = "line without a message"


def lacks(value: Any) -> list[str]:
    """What a line lacks to be one of Qwen Code's messages."""
    line = mapping(value)
    checks = {
        "type user, assistant or tool_result": line.get("type") in ("user", "assistant", "tool_result"),
        "a message with parts": isinstance(mapping(line.get("message")).get("parts"), list),
        "uuid": isinstance(line.get("uuid"), str),
        "sessionId": isinstance(line.get("sessionId"), str),
    }
    return [name for name, holds in checks.items() if not holds]


def read(parts: Sequence[Part]) -> Reading:
    """The session of a file; every line is a record."""
    return read_log(NAME, parts, lambda lines, fates: _Reader(fates).read(lines))


class _Reader:
    def __init__(self, fates: dict[int, str]) -> None:
        self._fates = fates
        self._draft = Draft()
        self._places: dict[str, tuple[int | None, tuple[int, ...]]] = {}
        self._parts: dict[str, list[Any]] = {}

    def read(self, lines: Sequence[Any]) -> Draft:
        """`_places` says of a uuid after which node its children stand, and which lines without a message lead there."""
        given = [mapping(line) for line in lines]
        names = [name_or_none(line.get("uuid")) for line in given]
        for record in parents_first(names, [name_or_none(line.get("parentUuid")) for line in given]):
            if record not in self._fates and (fate := self._take(record, given[record], names[record] or "")):
                self._fates[record] = fate
        return self._draft

    def _take(self, record: int, line: Mapping[str, Any], name: str) -> str | None:
        self._draft.name = self._draft.name or name_or_none(line.get("sessionId"))
        self._draft.cwd = self._draft.cwd or name_or_none(line.get("cwd"))
        at, links = self._places.get(name_or_none(line.get("parentUuid")) or "", (None, ()))
        if line.get("subtype") == "chat_compression":
            history = sequence(mapping(line.get("systemPayload")).get("compressedHistory"))
            node = self._add(None, (), [message for one in history for message in either_message(one)], record, True)
        elif line.get("type") in ("user", "assistant", "tool_result"):
            parts = self._parts.setdefault(name or str(record), [])
            is_first = not parts
            parts += sequence(mapping(line.get("message")).get("parts"))
            told = either_message({**mapping(line.get("message")), "parts": parts}) if parts else []
            if not is_first and told:
                return self._extend(self._places[name][0], told[0], line, record)
            node = self._add(at, links, told, record, False, line)
        else:
            node = None
        if node is None:
            self._places[name] = at, (*links, record)
            return NO_MESSAGE
        self._places[name] = node, ()
        return None

    def _add(self, at: int | None, links: Sequence[int], told: Sequence[Any], record: int, is_copied: bool, line: Mapping[str, Any] = {}) -> int | None:  # fmt: skip
        node = None
        for message in told:
            is_turn = message["role"] == "assistant"
            more = {"author": name_or_none(line.get("model")), "usage": mapping(line.get("usageMetadata")) or None}
            node = self._draft.add(message, at, [record], links=links, is_copied=is_copied, **(more if is_turn else {}))
            at, links = node, ()
        return node

    def _extend(self, node: int | None, message: Any, line: Mapping[str, Any], record: int) -> str | None:
        if node is None:
            return NO_MESSAGE
        old = self._draft.nodes[node]
        author = name_or_none(line.get("model"), old.author)
        self._draft.replace(node, message=message, author=author, records=(*old.records, record))
        return None
