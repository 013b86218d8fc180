"""Codex's sessions: JSON lines of {timestamp, type, payload}, whose response items are those of OpenAI's Responses.

A `token_count` closes a call. `compacted` replaces what the model sees: what follows is a branch of its own.
"""

from collections.abc import Mapping
from typing import Any

from composer_prime.traces.ingest.dialects.items import ItemFold
from composer_prime.traces.ingest.messages import plain
from composer_prime.traces.ingest.reading import Document, LineReader, Log
from composer_prime.traces.ingest.records import mapping, name_or_none, sequence, string

TYPES = ("session_meta", "turn_context", "event_msg", "response_item", "compacted")
NO_MESSAGE = "event without a message"


def _marks(value: Any) -> dict[str, bool]:
    line = mapping(value)
    return {
        f"type ({', '.join(TYPES)})": line.get("type") in TYPES,
        "a payload object": isinstance(line.get("payload"), dict),
    }


class _Reader(LineReader):
    def __init__(self) -> None:
        super().__init__()
        self._fold = ItemFold(self.draft)

    def read(self, lines: list[Any], fates: dict[int, str]) -> Document:
        document = super().read(lines, fates)
        self._fold.finish(fates)
        return document

    def take(self, number: int, line: Mapping[str, Any]) -> str | None:
        kind, payload = line.get("type"), mapping(line.get("payload"))
        if kind == "response_item":
            return self._fold.take(payload, number)
        if kind == "session_meta":
            return self._start(number, payload)
        if kind == "turn_context":
            return self._set_author(number, payload)
        if kind == "compacted":
            return self._compact(number, payload)
        return self._count(number, payload) if kind == "event_msg" else "line of an unknown type"

    def _start(self, number: int, payload: Mapping[str, Any]) -> str | None:
        """Its instructions are the system's message; later ones are of sessions that this one was forked from."""
        text = name_or_none(payload.get("instructions"), mapping(payload.get("base_instructions")).get("text"))
        if self.draft.name is not None or self.draft.nodes or self._fold.is_open:
            return NO_MESSAGE
        self.draft.name = name_or_none(payload.get("id"))
        if text is None:
            self._fold.records.append(number)
        else:
            self.draft.append(plain("system", text), number)
        return None

    def _set_author(self, number: int, payload: Mapping[str, Any]) -> str | None:
        model = name_or_none(payload.get("model"))
        if model is None or model == self._fold.author:
            return NO_MESSAGE
        self._fold.end_turn()
        self._fold.author = model
        self._fold.records.append(number)
        return None

    def _compact(self, number: int, payload: Mapping[str, Any]) -> str | None:
        """The history that replaces what was there, or a summary of it."""
        history = sequence(payload.get("replacement_history"))
        summary = string(payload.get("message"))
        if not history and not summary:
            return NO_MESSAGE
        self._fold.end_turn()
        self.draft.at, self._fold.is_copied = None, True
        for item in history or [{"role": "user", "content": summary}]:
            self._fold.take(item, number)
        self._fold.end_turn()
        self._fold.is_copied = False
        if self.draft.at is None:
            self.draft.append(plain("user", summary), number)
        return None

    def _count(self, number: int, payload: Mapping[str, Any]) -> str | None:
        usage = mapping(mapping(payload.get("info")).get("last_token_usage"))
        if payload.get("type") != "token_count" or not usage:
            return NO_MESSAGE
        if self._fold.is_open:
            self._fold.usage = usage
            self._fold.records.append(number)
            self._fold.end_turn()
            return None
        nodes = self.draft.nodes
        last = next((place for place in reversed(range(len(nodes))) if nodes[place].is_turn), None)
        if last is None or nodes[last].usage is not None or nodes[last].is_copied:
            return NO_MESSAGE
        return self.draft.replace(last, number, usage=usage)


FORMAT = Log("codex", _marks, _Reader)
