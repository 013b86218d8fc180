"""OpenHands' events: a list of them, or an object with such a `history`. Records are the events.

Actions that share a model's response are one call. An observation names the action that caused it. A condensation drops
events from what the model sees: what follows is a branch of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.dialects.exchanges import action_of
from composer_prime.traces.ingest.messages import assistant, plain, result, tool_call, tools_of
from composer_prime.traces.ingest.reading import Document, Reading, read_documents
from composer_prime.traces.ingest.records import Part, mapping, name_or_none, objects, sequence, string
from composer_prime.traces.ingest.session import Draft
from composer_prime.traces.states import Message

NAME = "openhands"
NO_MESSAGE = "event without a message"
SILENT = ("change_agent_state", "null", "recall")


def lacks(value: Any) -> list[str]:
    """What a JSON value lacks to be OpenHands' events."""
    events = objects(value if isinstance(value, list) else sequence(mapping(value).get("history")))
    checks = {
        "a list of events, or an object with history": bool(events),
        "events with source, and action or observation": any(
            "source" in event and "kind" not in event and ("action" in event or "observation" in event)
            for event in events
        ),
    }
    return [name for name, holds in checks.items() if not holds]


def read(parts: Sequence[Part]) -> Reading:
    """One session a list of events."""
    return read_documents(NAME, parts, lacks, _read)


def _read(value: Any) -> Document:
    return _Reader(sequence(mapping(value).get("history") if isinstance(value, dict) else value)).read()


class _Reader:
    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events
        self.draft = Draft()
        self._document = Document(list(events), drafts=[self.draft])
        self._at: int | None = None
        self._responses: dict[str, int] = {}
        self._made: dict[Any, str] = {}

    def read(self) -> Document:
        for number, given in enumerate(self._events):
            event = mapping(given)
            fate = self._observe(number, event) if "observation" in event else self._act(number, event)
            if fate is not None:
                self._document.fates[number] = fate
        return self._document

    def _act(self, number: int, event: Mapping[str, Any]) -> str | None:
        action, args = event.get("action"), mapping(event.get("args"))
        metadata = mapping(event.get("tool_call_metadata"))
        if action == "condensation":
            return self._condense(number, args)
        if action == "system" or (action == "message" and event.get("source") == "user"):
            self.draft.tools += tools_of(args.get("tools"))
            message = plain("system" if action == "system" else "user", args.get("content"))
            self._at = self.draft.add(message, self._at, [number])
            return None
        if not isinstance(action, str) or action in SILENT or event.get("source") != "agent":
            return NO_MESSAGE
        response = mapping(metadata.get("model_response"))
        name = name_or_none(response.get("id"))
        known = self._responses.get(name) if name else None
        if known is not None:
            self.draft.replace(known, records=(*self.draft.nodes[known].records, number))
            return None
        message = action_of(response) or self._spelled(number, event, metadata)
        author, usage = name_or_none(response.get("model")), mapping(response.get("usage")) or None
        self._at = self.draft.add(message, self._at, [number], author=author, usage=usage, call=name)
        if name:
            self._responses[name] = self._at
        return None

    def _spelled(self, number: int, event: Mapping[str, Any], metadata: Mapping[str, Any]) -> Message:
        """The message of an action that doesn't hold the model's own: its thought, and its arguments as a call."""
        args = mapping(event.get("args"))
        thought = string(args.get("thought"))
        if event["action"] == "message":
            return assistant(args.get("content"))
        call_id = name_or_none(metadata.get("tool_call_id")) or f"event_{number}"
        self._made[_event_id(event)] = call_id
        given = {name: value for name, value in args.items() if name != "thought"}
        return assistant(thought, [tool_call(call_id, metadata.get("function_name", event["action"]), given)])

    def _observe(self, number: int, event: Mapping[str, Any]) -> str | None:
        if not isinstance(event.get("content"), str) or event["observation"] in ("agent_state_changed", *SILENT):
            return NO_MESSAGE
        cause = event.get("cause")
        call_id = name_or_none(mapping(event.get("tool_call_metadata")).get("tool_call_id"))
        call_id = call_id or (self._made.get(cause) if isinstance(cause, int | str) else None) or ""
        refusal = self.draft.refusal(self._at, call_id) if call_id else None
        if refusal is None:  # what names no call, such as a refused action's error, is shown as a user's
            message = result(call_id, event["content"]) if call_id else plain("user", event["content"])
            self._at = self.draft.add(message, self._at, [number])
        return refusal

    def _condense(self, number: int, args: Mapping[str, Any]) -> str | None:
        """A branch of copies of what the model still sees, with the summary of the rest."""
        listed = sequence(args.get("forgotten_event_ids"))
        first, last = args.get("forgotten_events_start_id"), args.get("forgotten_events_end_id")
        path = [] if self._at is None else self.draft.path(self._at)
        gone = [place for place in path if self._is_forgotten(place, listed, first, last)]
        if not gone:
            return NO_MESSAGE
        self._at = condensed(self.draft, path, gone, string(args.get("summary")), number)
        return None

    def _is_forgotten(self, place: int, listed: Sequence[Any], first: Any, last: Any) -> bool:
        event = _event_id(mapping(self._events[self.draft.nodes[place].records[0]]))
        return event in listed or (all(type(one) is int for one in (first, event, last)) and first <= event <= last)


def condensed(draft: Draft, path: Sequence[int], gone: Sequence[int], summary: str, record: int) -> int | None:
    """Add a branch of copies of a path, with a summary in place of the nodes that are gone; its last node.

    Results whose calls are gone go with them.
    """
    at: int | None = None
    for place in path:
        node = draft.nodes[place]
        if place == gone[0]:
            at = draft.add(plain("user", summary), at, [record])
        is_orphan = node.message["role"] == "tool" and draft.refusal(at, node.message["tool_call_id"]) is not None
        if place not in gone and not is_orphan:
            more = {"author": node.author, "usage": node.usage, "call": node.call}
            at = draft.add(node.message, at, [record], is_copied=True, **more)
    return at


def _event_id(event: Mapping[str, Any]) -> Any:
    found = event.get("id")
    return found if isinstance(found, int | str) else None
