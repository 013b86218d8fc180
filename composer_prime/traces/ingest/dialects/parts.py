"""Messages whose content is a list of parts, in whichever dialect: a chat's, with the calls and results made out.

Anthropic's blocks, the parts of Gemini's contents, of OpenTelemetry's GenAI messages and of Vercel's AI SDK, and
LangChain's messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_prime.traces.ingest.messages import ROLES, assistant, chat_message, json_text, plain, result, tool_call
from composer_prime.traces.ingest.records import mapping, objects, sequence, string
from composer_prime.traces.states import Message, calls_of

CALLS = ("tool_use", "tool_call", "tool-call")
RESULTS = ("tool_result", "tool_call_response", "tool-result")
THINKING = ("thinking", "redacted_thinking", "reasoning")
_ROLES = {"human": "user", "ai": "assistant", "model": "assistant", "AIMessageChunk": "assistant", "info": "system"}
_LANGCHAIN = {"HumanMessage": "user", "AIMessage": "assistant", "SystemMessage": "system", "ToolMessage": "tool"}


@dataclass
class Parts:
    """A message's parts by what they are; `rest` is text, and what only text can stand in for."""

    thinking: list[str] = field(default_factory=list)
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)
    rest: list[Any] = field(default_factory=list)

    def take(self, part: Any) -> None:
        """Sort a part in."""
        given, kind = mapping(part), string(mapping(part).get("type"))
        if call := mapping(_first(given, "functionCall", "function_call")):
            call_id, given_to = self._id(call, self.calls), _first(call, "args", "arguments")
            self.calls.append(tool_call(call_id, call.get("name"), given_to))
        elif answer := mapping(_first(given, "functionResponse", "function_response")):
            said = answer.get("response")
            said = _first(mapping(said), "output", "result", "error") or said
            self.results.append(result(self._id(answer, self.results), said))
        elif kind in CALLS:
            call_id, name = _text_id(given, "id", "toolCallId", "tool_call_id"), _first(given, "name", "toolName")
            self.calls.append(tool_call(call_id, name, _first(given, "input", "arguments", "args")))
        elif kind in RESULTS:
            call_id = _text_id(given, "tool_use_id", "toolCallId", "id")
            said = _first(given, "content", "response", "result", "output")
            said = mapping(said).get("value", said)  # Vercel's {"type", "value"}
            self.results.append(result(call_id, said))
        elif kind in THINKING or "Reasoning" in kind or given.get("thought") is True:
            self.thinking.append(string(_first(given, "thinking", "content", "text", "reasoning")))
        elif not _is_servers(kind):
            self.rest.append(part)

    @staticmethod
    def _id(given: Mapping[str, Any], before: Sequence[Any]) -> str:
        """Gemini's calls may lack an id: those of one message are then told apart by their number."""
        return string(given.get("id")) or f"{string(given.get('name'))}:{len(before)}"


def has_parts(given: Any) -> bool:
    """Whether a message holds parts that OpenAI's chat completions don't know."""
    message = mapping(given)
    kinds = [string(block.get("type")) for block in objects(sequence(message.get("content")))]
    known = (*CALLS, *RESULTS, *THINKING)
    return "parts" in message or any(kind in known or _is_servers(kind) for kind in kinds)


def part_messages(given: Mapping[str, Any]) -> list[Message]:
    """A message with parts: an assistant's; or tools' results, and what is said after them."""
    role = _role(given)
    content = given.get("parts", given.get("content"))
    parts = Parts()
    for part in content if isinstance(content, list) else [content] if content else []:
        parts.take(part)
    if role == "assistant":
        own = chat_message({**given, "role": role, "content": None}) or {}
        known = {call["id"] for call in parts.calls}
        calls = [*parts.calls, *(call for call in calls_of(own) if call["id"] not in known)]
        thinking = "\n".join(text for text in [own.get("reasoning_content", ""), *parts.thinking] if text)
        return [assistant(parts.rest, calls, thinking), *parts.results]
    if role == "tool" and given.get("tool_call_id") and not parts.results:
        return [result(string(given["tool_call_id"]), parts.rest)]
    said = plain(role if role == "system" else "user", parts.rest)
    return [*parts.results, said] if parts.rest or not parts.results else parts.results


def either_message(given: Any) -> list[Message]:
    """A message in any dialect as messages of a chat; none where it has no role that one knows."""
    message = _plain_message(mapping(given))
    role = _role(message)
    if role not in ROLES and role != "function":
        return []
    if has_parts(message):
        return part_messages(message)
    found = chat_message({**message, "role": role})
    return [] if found is None else [found]


def _plain_message(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message that LangChain wrote, as one with a role and its fields beside it."""
    fields = mapping(given.get("kwargs")) or mapping(given.get("data")) or given
    kind = string(fields.get("type", given.get("type")))
    names = sequence(given.get("id"))
    if names and isinstance(names[-1], str):
        kind = _LANGCHAIN.get(names[-1].removesuffix("Chunk"), kind)
    role = given.get("role", kind)
    calls = fields.get("tool_calls") or mapping(fields.get("additional_kwargs")).get("tool_calls")
    return {**fields, "role": role, **({"tool_calls": calls} if calls else {})}


def _is_servers(kind: str) -> bool:
    """Whether a part is what a provider's own tools did within the call: neither a text of the model nor a call."""
    return kind in ("server_tool_use", "mcp_tool_use") or (kind.endswith("_tool_result") and kind not in RESULTS)


def _role(given: Mapping[str, Any]) -> str:
    role = string(given.get("role"))
    return _ROLES.get(role, role)


def _first(given: Mapping[str, Any], *names: str) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), None)


def _text_id(given: Mapping[str, Any], *names: str) -> str:
    call_id = _first(given, *names)
    return "" if call_id is None else json_text(call_id)
