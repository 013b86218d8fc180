"""OpenHands' events: a list of them, or an object with such a `history`. Records are the events.

Actions that share a model's response are one call. An observation names the action that caused it. A condensation drops
events from what the model sees: what follows is a branch of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.dialects.exchanges import action_of
from composer_prime.traces.ingest.messages import assistant, plain, result, tool_call, tools_of
from composer_prime.traces.ingest.reading import LineReader, Log
from composer_prime.traces.ingest.records import mapping, name_or_none, objects, sequence, string
from composer_prime.traces.ingest.session import path_of
from composer_prime.traces.states import Message

NO_MESSAGE = "event without a message"
SILENT = ("change_agent_state", "null", "recall")


def _events(value: Any) -> Sequence[Any]:
    return sequence(mapping(value).get("history", value))


def _marks(value: Any) -> dict[str, bool]:
    events = objects(_events(value))
    ours = [event for event in events if "source" in event and "kind" not in event]
    return {
        "a list of events, or an object with history": bool(events),
        "events with source, and action or observation": any("action" in one or "observation" in one for one in ours),
    }


class EventReader(LineReader):
    """Reads the events of either version; `responses` are nodes by the name of the model's response."""

    def __init__(self) -> None:
        super().__init__()
        self.responses: dict[str, int] = {}

    def add(self, message: Message, number: int, **more: Any) -> None:
        """Add a message; `more` are fields of Node."""
        self.draft.append(message, number, **more)
        if more.get("call") and self.draft.at is not None:
            self.responses[more["call"]] = self.draft.at

    def answer(self, call_id: str, content: Any, number: int) -> str | None:
        """Add a tool's result; why it can't stand there, if it can't."""
        return self.draft.refusal(self.draft.at, call_id) or self.add(result(call_id, content), number)

    def condense(self, number: int, given: Mapping[str, Any]) -> str | None:
        """Begin a branch of copies of what the model still sees, with a summary of the events that `given` names.

        Results whose calls are gone go with them.
        """
        draft = self.draft
        path = path_of(draft.nodes, draft.at)
        gone = [place for place in path if _is_gone(self.lines[draft.nodes[place].records[0]].get("id"), given)]
        if not gone:
            return NO_MESSAGE
        draft.at = None
        for place in path:
            node = draft.nodes[place]
            if place == gone[0]:
                draft.append(plain("user", string(given.get("summary"))), number)
            call_id = node.message.get("tool_call_id")
            if place not in gone and (call_id is None or draft.refusal(draft.at, call_id) is None):
                more = {"author": node.author, "usage": node.usage, "call": node.call}
                draft.append(node.message, number, is_copied=True, **more)
        return None


def _is_gone(event: Any, given: Mapping[str, Any]) -> bool:
    first, last = given.get("forgotten_events_start_id"), given.get("forgotten_events_end_id")
    is_between = all(type(one) is int for one in (first, event, last)) and first <= event <= last
    return is_between or event in sequence(given.get("forgotten_event_ids"))


class _Reader(EventReader):
    def __init__(self) -> None:
        super().__init__()
        self._made: dict[Any, str] = {}

    def take(self, number: int, line: Mapping[str, Any]) -> str | None:
        if "observation" in line:
            return self._observe(number, line)
        action, args = line.get("action"), mapping(line.get("args"))
        if action == "condensation":
            return self.condense(number, args)
        if action == "system" or (action == "message" and line.get("source") == "user"):
            self.draft.tools += tools_of(args.get("tools"))
            return self.add(plain("system" if action == "system" else "user", args.get("content")), number)
        if not isinstance(action, str) or action in SILENT or line.get("source") != "agent":
            return NO_MESSAGE
        metadata = mapping(line.get("tool_call_metadata"))
        response = mapping(metadata.get("model_response"))
        name = name_or_none(response.get("id"))
        if name in self.responses:
            return self.draft.replace(self.responses[name], number)
        message = action_of(response) or self._spelled(number, line, args, metadata)
        author, usage = name_or_none(response.get("model")), mapping(response.get("usage")) or None
        return self.add(message, number, author=author, usage=usage, call=name)

    def _spelled(
        self, number: int, line: Mapping[str, Any], args: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> Message:
        """The message of an action that doesn't hold the model's own: its thought, and its arguments as a call."""
        if line["action"] == "message":
            return assistant(args.get("content"))
        call_id = name_or_none(metadata.get("tool_call_id")) or f"event_{number}"
        if isinstance(line.get("id"), int | str):
            self._made[line["id"]] = call_id
        given = {name: value for name, value in args.items() if name != "thought"}
        call = tool_call(call_id, metadata.get("function_name", line["action"]), given)
        return assistant(string(args.get("thought")), [call])

    def _observe(self, number: int, line: Mapping[str, Any]) -> str | None:
        if not isinstance(line.get("content"), str) or line["observation"] in ("agent_state_changed", *SILENT):
            return NO_MESSAGE
        cause = line.get("cause")
        named = name_or_none(mapping(line.get("tool_call_metadata")).get("tool_call_id"))
        if call_id := named or (self._made.get(cause) if isinstance(cause, int | str) else None):
            return self.answer(call_id, line["content"], number)
        return self.add(plain("user", line["content"]), number)  # such as a refused action's error


FORMAT = Log("openhands", _marks, _Reader, _events)
