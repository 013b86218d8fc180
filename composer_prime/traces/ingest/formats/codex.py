"""Codex's sessions: JSON lines of {timestamp, type, payload}, whose response items are those of OpenAI's Responses.

A `token_count` closes a call. `compacted` replaces what the model sees: what follows is a branch of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.dialects.items import ItemFold
from composer_prime.traces.ingest.messages import plain
from composer_prime.traces.ingest.reading import Reading, read_log
from composer_prime.traces.ingest.records import Part, mapping, name_or_none, sequence, string
from composer_prime.traces.ingest.session import Draft

NAME = "codex"
TYPES = ("session_meta", "turn_context", "event_msg", "response_item", "compacted")
NO_MESSAGE = "event without a message"


def lacks(value: Any) -> list[str]:
    """What a line lacks to be one of Codex's."""
    line = mapping(value)
    checks = {
        f"type ({', '.join(TYPES)})": line.get("type") in TYPES,
        "a payload object": isinstance(line.get("payload"), dict),
    }
    return [name for name, holds in checks.items() if not holds]


def read(parts: Sequence[Part]) -> Reading:
    """The session of a file; every line is a record."""
    return read_log(NAME, parts, lambda lines, fates: _Reader(fates).read(lines))


class _Reader:
    def __init__(self, fates: dict[int, str]) -> None:
        self._fates = fates
        self._draft = Draft()
        self._fold = ItemFold(self._draft)

    def read(self, lines: Sequence[Any]) -> Draft:
        for record, line in enumerate(lines):
            if record not in self._fates:
                fate = self._take(record, mapping(line))
                if fate is not None:
                    self._fates[record] = fate
        self._fold.finish(self._fates)
        return self._draft

    def _take(self, record: int, line: Mapping[str, Any]) -> str | None:
        kind, payload = line.get("type"), mapping(line.get("payload"))
        if kind == "response_item":
            return self._fold.take(payload, record)
        if kind == "session_meta":
            return self._start(record, payload)
        if kind == "turn_context":
            return self._set_author(record, payload)
        if kind == "compacted":
            return self._compact(record, payload)
        if kind == "event_msg":
            return self._count(record, payload)
        return "line of an unknown type"

    def _start(self, record: int, payload: Mapping[str, Any]) -> str | None:
        """Its instructions are the system's message; later ones are of sessions that this one was forked from."""
        text = name_or_none(payload.get("instructions"), mapping(payload.get("base_instructions")).get("text"))
        if self._draft.name is not None or self._draft.nodes or self._fold.is_open:
            return NO_MESSAGE
        self._draft.name = name_or_none(payload.get("id"))
        if text is None:
            self._fold.note(record)
        else:
            self._fold.at = self._draft.add(plain("system", text), None, [record])
        return None

    def _set_author(self, record: int, payload: Mapping[str, Any]) -> str | None:
        model = name_or_none(payload.get("model"))
        if model is None or model == self._fold.author:
            return NO_MESSAGE
        self._fold.end_turn()
        self._fold.author = model
        self._fold.note(record)
        return None

    def _compact(self, record: int, payload: Mapping[str, Any]) -> str | None:
        """The history that replaces what was there, or a summary of it."""
        history = sequence(payload.get("replacement_history"))
        summary = string(payload.get("message"))
        if not history and not summary:
            return NO_MESSAGE
        self._fold.end_turn()
        self._fold.at, self._fold.is_copied = None, True
        for item in history or [{"role": "user", "content": summary}]:
            self._fold.take(item, record)
        self._fold.end_turn()
        self._fold.is_copied = False
        if self._fold.at is None:
            self._fold.at = self._draft.add(plain("user", summary), None, [record])
        return None

    def _count(self, record: int, payload: Mapping[str, Any]) -> str | None:
        usage = mapping(mapping(payload.get("info")).get("last_token_usage"))
        if payload.get("type") != "token_count" or not usage:
            return NO_MESSAGE
        if self._fold.is_open:
            self._fold.usage = usage
            self._fold.note(record)
            self._fold.close()
            return None
        nodes = self._draft.nodes
        last = next((place for place in reversed(range(len(nodes))) if nodes[place].is_turn), None)
        if last is None or nodes[last].usage is not None or nodes[last].is_copied:
            return NO_MESSAGE
        self._draft.replace(last, usage=usage, records=(*nodes[last].records, record))
        return None
