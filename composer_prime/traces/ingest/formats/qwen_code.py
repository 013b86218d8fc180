"""Qwen Code's sessions: JSON lines whose messages have Gemini's parts, and which name the line before them.

A line that comes again under its uuid adds to the message. A compression's history replaces what was there.
"""

from collections.abc import Mapping
from typing import Any

from composer_prime.traces.ingest.dialects.parts import either_message
from composer_prime.traces.ingest.reading import LineReader, Log
from composer_prime.traces.ingest.records import mapping, name_or_none, sequence

TYPES = ("user", "assistant", "tool_result")
NO_MESSAGE = "line without a message"


def _marks(value: Any) -> dict[str, bool]:
    line = mapping(value)
    return {
        "type user, assistant or tool_result": line.get("type") in TYPES,
        "a message with parts": isinstance(mapping(line.get("message")).get("parts"), list),
        "uuid": isinstance(line.get("uuid"), str),
        "sessionId": isinstance(line.get("sessionId"), str),
    }


class _Reader(LineReader):
    """`_places` says of a name after which node its children stand, and which lines without a message lie between."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, tuple[int | None, tuple[int, ...]]] = {}
        self._turns: dict[str, tuple[int, list[Any]]] = {}

    def take(self, number: int, line: Mapping[str, Any]) -> str | None:
        draft, told = self.draft, mapping(line.get("message"))
        name = name_or_none(line.get("uuid")) or f"line {number}"
        draft.name = draft.name or name_or_none(line.get("sessionId"))
        draft.cwd = draft.cwd or name_or_none(line.get("cwd"))
        parts = list(sequence(told.get("parts")))
        more = {"author": name_or_none(line.get("model")), "usage": mapping(line.get("usageMetadata")) or None}
        if name in self._turns and line.get("type") == "assistant":
            node, known = self._turns[name]
            known += [part for part in parts if part not in known]
            more = {field: value for field, value in more.items() if value}
            return draft.replace(node, number, message=either_message({"role": "model", "parts": known})[0], **more)
        at, links = self._places.get(name_or_none(line.get("parentUuid")) or "", (None, ()))
        messages = either_message(told) if line.get("type") in TYPES and parts else []
        if is_copied := line.get("subtype") == "chat_compression":
            history = sequence(mapping(line.get("systemPayload")).get("compressedHistory"))
            messages = [message for one in history for message in either_message(one)]
            at, links = (None, ()) if messages else (at, links)
        self._places[name] = at, (*links, number)
        for message in messages:
            is_turn = message["role"] == "assistant"
            at = draft.add(message, at, [number], links=links, is_copied=is_copied, **(more if is_turn else {}))
            links = ()
            self._places[name] = at, ()
            if is_turn and not is_copied:
                self._turns[name] = at, parts
        return None if messages else NO_MESSAGE


FORMAT = Log("qwen-code", _marks, _Reader)
