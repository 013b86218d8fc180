"""Events of OpenHands' software-agent-sdk (V1): a list, one a line, or one a file of a folder. Records are the events.

Actions that share a model's response are one call. Its text is in the first one's thought. A condensation drops events
from what the model sees: what follows is a branch of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.formats.openhands import condensed
from composer_prime.traces.ingest.messages import assistant, plain, result, tool_call, tools_of
from composer_prime.traces.ingest.reading import Reading, read_events
from composer_prime.traces.ingest.records import Part, mapping, name_or_none, objects, sequence, string
from composer_prime.traces.ingest.session import Draft
from composer_prime.traces.states import calls_of

NAME = "openhands-v1"
NO_MESSAGE = "event without a message"
KINDS = ("SystemPromptEvent", "MessageEvent", "ActionEvent", "ObservationEvent", "ConversationStateUpdateEvent",
         "AgentErrorEvent", "UserRejectObservation", "PauseEvent", "Condensation", "CondensationRequest")  # fmt: skip


def lacks(value: Any) -> list[str]:
    """What a JSON value lacks to be an event, or a list of them."""
    events = objects(value if isinstance(value, list) else [value])
    checks = {
        "events with a kind such as ActionEvent": any(event.get("kind") in KINDS for event in events),
        "source": any("source" in event for event in events),
    }
    return [name for name, holds in checks.items() if not holds]


def read(parts: Sequence[Part]) -> Reading:
    """One session a list; lines, and files of a folder, are the events of one."""
    return read_events(NAME, parts, lacks, lambda events, fates: _Reader(events, fates).read())


class _Reader:
    def __init__(self, events: Sequence[Any], fates: dict[int, str]) -> None:
        self._events = [mapping(event) for event in events]
        self._fates = fates
        self._draft = Draft()
        self._at: int | None = None
        self._responses: dict[str, int] = {}
        self._author: str | None = None
        self._links: tuple[int, ...] = ()

    def read(self) -> Draft:
        for number, event in enumerate(self._events):
            if number not in self._fates and (fate := self._take(number, event)):
                self._fates[number] = fate
        return self._draft

    def _take(self, number: int, event: Mapping[str, Any]) -> str | None:
        kind, told = event.get("kind"), mapping(event.get("llm_message"))
        if kind == "SystemPromptEvent":
            self._draft.tools += tools_of(event.get("tools"))  # older versions log no names and no parameters
            shown = [event.get(name) for name in ("system_prompt", "dynamic_context") if event.get(name)]
            return self._add(plain("system", shown), number)
        if kind == "MessageEvent" and event.get("source") != "agent":
            shown = [*sequence(told.get("content")), *sequence(event.get("extended_content"))]
            return self._add(plain("user", shown), number)
        if kind in ("MessageEvent", "ActionEvent"):
            return self._act(number, event, told)
        if kind == "Condensation":
            return self._condense(number, event)
        text = event.get("error", event.get("rejection_reason"))
        seen = mapping(event.get("observation"))
        if text is None and not seen:
            return self._note(number, event)
        call_id = string(event.get("tool_call_id"))
        refusal = self._draft.refusal(self._at, call_id)
        if refusal is None:
            self._add(result(call_id, seen.get("content", seen.get("output")) if seen else text), number)
        return refusal

    def _add(self, message: Mapping[str, Any], number: int, **more: Any) -> None:
        self._at = self._draft.add(message, self._at, [number], links=self._links, **more)
        self._links = ()

    def _act(self, number: int, event: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        """An action's call, or a message of the agent's."""
        given = mapping(event.get("tool_call"))
        arguments = given.get("arguments", event.get("action"))
        name = name_or_none(event.get("tool_name"), given.get("name"))
        calls = [tool_call(event.get("tool_call_id"), name, arguments)] if event["kind"] == "ActionEvent" else []
        response = name_or_none(event.get("llm_response_id"))
        known = self._responses.get(response) if response else None
        if known is not None:
            old = self._draft.nodes[known]
            message = {**old.message, "tool_calls": [*calls_of(old.message), *calls]}
            self._draft.replace(known, message=message, records=(*old.records, number))
            return
        thinking = name_or_none(event.get("reasoning_content"), told.get("reasoning_content")) or ""
        message = assistant(event.get("thought") or told.get("content"), calls, thinking)
        self._add(message, number, author=self._author, call=response)
        if response and self._at is not None:
            self._responses[response] = self._at

    def _note(self, number: int, event: Mapping[str, Any]) -> str:
        """Which model acts, as the state's statistics name it."""
        usage = mapping(mapping(event.get("value")).get("usage_to_metrics"))
        author = name_or_none(mapping(usage.get("agent", usage.get("default"))).get("model_name"))
        if author is not None and author != self._author:
            self._author, self._links = author, (number,)
        return NO_MESSAGE

    def _condense(self, number: int, event: Mapping[str, Any]) -> str | None:
        listed = sequence(event.get("forgotten_event_ids"))
        path = [] if self._at is None else self._draft.path(self._at)
        gone = [place for place in path if self._events[self._draft.nodes[place].records[0]].get("id") in listed]
        self._at = condensed(self._draft, path, gone, string(event.get("summary")), number) if gone else self._at
        return None if gone else NO_MESSAGE
