"""Events of OpenHands' software-agent-sdk (V1): a list, one a line, or one a file of a folder. Records are the events.

Actions that share a model's response are one call. Its text is in the first one's thought. A condensation drops events
from what the model sees: what follows is a branch of its own.
"""

from collections.abc import Mapping
from typing import Any

from composer_prime.traces.ingest.formats.openhands import NO_MESSAGE, EventReader
from composer_prime.traces.ingest.messages import assistant, plain, tool_call, tools_of
from composer_prime.traces.ingest.reading import Log
from composer_prime.traces.ingest.records import each, mapping, name_or_none, objects, sequence, string
from composer_prime.traces.states import Message, calls_of

KINDS = ("SystemPromptEvent", "MessageEvent", "ActionEvent", "ObservationEvent", "ConversationStateUpdateEvent",
         "AgentErrorEvent", "UserRejectObservation", "PauseEvent", "Condensation", "CondensationRequest")  # fmt: skip


def _marks(value: Any) -> dict[str, bool]:
    events = objects(each(value))
    return {
        "events with a kind such as ActionEvent": any(event.get("kind") in KINDS for event in events),
        "source": any("source" in event for event in events),
    }


class _Reader(EventReader):
    def __init__(self) -> None:
        super().__init__()
        self._author: str | None = None
        self._links: tuple[int, ...] = ()

    def add(self, message: Message, number: int, **more: Any) -> None:
        super().add(message, number, links=self._links, **more)
        self._links = ()

    def take(self, number: int, line: Mapping[str, Any]) -> str | None:
        kind, told = line.get("kind"), mapping(line.get("llm_message"))
        if kind == "SystemPromptEvent":
            self.draft.tools += tools_of(line.get("tools"))  # older versions log no names and no parameters
            shown = [line.get(name) for name in ("system_prompt", "dynamic_context") if line.get(name)]
            return self.add(plain("system", shown), number)
        if kind == "MessageEvent" and line.get("source") != "agent":
            shown = [*sequence(told.get("content")), *sequence(line.get("extended_content"))]
            return self.add(plain("user", shown), number)
        if kind in ("MessageEvent", "ActionEvent"):
            return self._act(number, line, told)
        if kind == "Condensation":
            return self.condense(number, line)
        text = line.get("error", line.get("rejection_reason"))
        seen = mapping(line.get("observation"))
        if text is None and not seen:
            return self._note(number, line)
        text = seen.get("content", seen.get("output")) if seen else text
        return self.answer(string(line.get("tool_call_id")), text, number)

    def _act(self, number: int, line: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        """An action's call, or a message of the agent's."""
        given = mapping(line.get("tool_call"))
        arguments = given.get("arguments", line.get("action"))
        name = name_or_none(line.get("tool_name"), given.get("name"))
        calls = [tool_call(line.get("tool_call_id"), name, arguments)] if line["kind"] == "ActionEvent" else []
        response = name_or_none(line.get("llm_response_id"))
        if response in self.responses:
            old = self.draft.nodes[self.responses[response]].message
            message = {**old, "tool_calls": [*calls_of(old), *calls]}
            return self.draft.replace(self.responses[response], number, message=message)
        thinking = name_or_none(line.get("reasoning_content"), told.get("reasoning_content")) or ""
        message = assistant(line.get("thought") or told.get("content"), calls, thinking)
        return self.add(message, number, author=self._author, call=response)

    def _note(self, number: int, line: Mapping[str, Any]) -> str:
        """Which model acts, as the state's statistics name it."""
        usage = mapping(mapping(line.get("value")).get("usage_to_metrics"))
        author = name_or_none(mapping(usage.get("agent", usage.get("default"))).get("model_name"))
        if author is not None and author != self._author:
            self._author, self._links = author, (number,)
        return NO_MESSAGE


FORMAT = Log("openhands-v1", _marks, _Reader)
