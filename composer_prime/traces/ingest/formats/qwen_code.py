"""Qwen Code's sessions: JSON lines whose messages have Gemini's parts, and which name the line before them.

A line that comes again under its uuid adds to the message. A compression's history replaces what was there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.dialects.parts import either_message
from composer_prime.traces.ingest.reading import Reading, parents_first, read_log
from composer_prime.traces.ingest.records import Part, mapping, name_or_none, sequence
from composer_prime.traces.ingest.session import Draft

NAME = "qwen-code"
TYPES = ("user", "assistant", "tool_result")
NO_MESSAGE = "line without a message"


def lacks(value: Any) -> list[str]:
    """What a line lacks to be one of Qwen Code's messages."""
    line = mapping(value)
    checks = {
        "type user, assistant or tool_result": line.get("type") in TYPES,
        "a message with parts": isinstance(mapping(line.get("message")).get("parts"), list),
        "uuid": isinstance(line.get("uuid"), str),
        "sessionId": isinstance(line.get("sessionId"), str),
    }
    return [name for name, holds in checks.items() if not holds]


def read(parts: Sequence[Part]) -> Reading:
    """The session of a file; every line is a record."""
    return read_log(NAME, parts, lambda lines, fates: _Reader(fates).read(lines))


class _Reader:
    """`_places` says of a name after which node its children stand, and which lines without a message lie between."""

    def __init__(self, fates: dict[int, str]) -> None:
        self._fates = fates
        self._draft = Draft()
        self._places: dict[str, tuple[int | None, tuple[int, ...]]] = {}
        self._turns: dict[str, tuple[int, list[Any]]] = {}

    def read(self, lines: Sequence[Any]) -> Draft:
        given = [mapping(line) for line in lines]
        names = [name_or_none(line.get("uuid")) for line in given]
        for record in parents_first(names, [name_or_none(line.get("parentUuid")) for line in given]):
            if record not in self._fates and not self._take(record, given[record], names[record] or f"record {record}"):
                self._fates[record] = NO_MESSAGE
        return self._draft

    def _take(self, record: int, line: Mapping[str, Any], name: str) -> bool:
        """Add what a line says; whether it says anything."""
        draft, told = self._draft, mapping(line.get("message"))
        draft.name = draft.name or name_or_none(line.get("sessionId"))
        draft.cwd = draft.cwd or name_or_none(line.get("cwd"))
        parts = list(sequence(told.get("parts")))
        more = {"author": name_or_none(line.get("model")), "usage": mapping(line.get("usageMetadata")) or None}
        if name in self._turns and line.get("type") == "assistant":
            node, known = self._turns[name]
            known += [part for part in parts if part not in known]
            records = (*draft.nodes[node].records, record)
            more = {field: value for field, value in more.items() if value}
            draft.replace(node, message=either_message({"role": "model", "parts": known})[0], records=records, **more)
            return True
        at, links = self._places.get(name_or_none(line.get("parentUuid")) or "", (None, ()))
        messages = either_message(told) if line.get("type") in TYPES and parts else []
        is_copied = line.get("subtype") == "chat_compression"
        if is_copied:
            history = sequence(mapping(line.get("systemPayload")).get("compressedHistory"))
            messages = [message for one in history for message in either_message(one)]
            at, links = (None, ()) if messages else (at, links)
        self._places[name] = at, (*links, record)
        for message in messages:
            is_turn = message["role"] == "assistant"
            at = draft.add(message, at, [record], links=links, is_copied=is_copied, **(more if is_turn else {}))
            links = ()
            self._places[name] = at, ()
            if is_turn and not is_copied:
                self._turns[name] = at, parts
        return bool(messages)
