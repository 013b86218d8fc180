"""Messages and tools of other dialects as OpenAI's chat completions have them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.context import IMAGE, OTHER
from composer_prime.traces.ingest.records import mapping, name_or_none, objects, sequence, string
from composer_prime.traces.states import Message, Tool

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def content_text(content: Any) -> str:
    """A message's content as text: its text parts, with a mark for each other part."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content)
    return "" if content is None else json_text(content)


def _part_text(part: Any) -> str:
    """A part's text, be it in OpenAI's, Anthropic's, Gemini's or OpenTelemetry's spelling."""
    if isinstance(part, str):
        return part
    given = mapping(part)
    kind, source = string(given.get("type")), mapping(given.get("source"))
    texts = [given.get("text"), given.get("refusal"), given.get("tool_name")]
    if kind in ("text", "file", "document", "search_result"):
        texts += [given.get("content"), source.get("data") if source.get("type") == "text" else None]
    found = next((text for text in texts if isinstance(text, str)), None)
    if found is not None:
        return found
    inner = given.get("content", source.get("content"))
    if kind in ("document", "search_result") and isinstance(inner, list):
        return content_text(inner)
    inline = mapping(given.get("inlineData", given.get("inline_data")))
    return IMAGE if "image" in kind + string(inline.get("mimeType", inline.get("mime_type"))) else OTHER


def json_text(value: Any) -> str:
    """A JSON value as text; a text as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def plain(role: str, content: Any) -> Message:
    """A system's or a user's message."""
    return {"role": role, "content": content_text(content)}


def result(call_id: str, content: Any) -> Message:
    """A tool's message."""
    return {"role": "tool", "content": content_text(content), "tool_call_id": call_id}


def assistant(content: Any, calls: Sequence[Mapping[str, Any]] = (), thinking: str = "") -> Message:
    """An assistant's message; fields without a value are left out."""
    message: dict[str, Any] = {"role": "assistant", "content": content_text(content)}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return message


def tool_call(call_id: Any, name: Any, arguments: Any) -> Mapping[str, Any]:
    """A call of a tool. Arguments that aren't text become JSON text."""
    text = "{}" if arguments is None else json_text(arguments)
    return {"id": string(call_id), "type": "function", "function": {"name": string(name), "arguments": text}}


def tool(name: Any, description: Any, parameters: Any) -> Tool:
    """A tool's definition."""
    schema = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    function = {"name": string(name), "description": string(description), "parameters": schema}
    return {"type": "function", "function": function}


def tools_of(listed: Any) -> list[Tool]:
    """Tools as chat completions, Responses, Anthropic or verifiers list them."""
    found = []
    for item in objects(sequence(listed)):
        found += tools_of(item.get("function_declarations", item.get("functionDeclarations")))  # Gemini's
        inner = mapping(item.get("function")) or item
        if name_or_none(inner.get("name")):
            names = ("parameters", "input_schema", "inputSchema", "parametersJsonSchema", "parameters_json_schema")
            schema = next((inner[name] for name in names if inner.get(name)), None)
            found.append(tool(inner["name"], inner.get("description"), schema))
    return found


def chat_message(data: Any) -> Message | None:
    """One message of a chat; None: it has no role that a chat knows.

    Calls may be nested in `function` or flat, as verifiers has them; the older `function_call` and its results are
    called by the function's name.
    """
    given = mapping(data)
    role = string(given.get("role"))
    if role in ("tool", "function"):
        named = [given.get("tool_call_id"), *sequence(given.get("tool_call_ids"))]
        return result(name_or_none(*(named if role == "tool" else [given.get("name")])) or "", given.get("content"))
    if role == "assistant":
        thinking = name_or_none(given.get("reasoning_content"), given.get("reasoning"))
        return assistant(given.get("content"), _calls(given), thinking or "")
    return plain(ROLES[role], given.get("content")) if role in ROLES else None


def _calls(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = []
    for call in objects(sequence(given.get("tool_calls"))):
        function = mapping(call.get("function")) or mapping(call.get("custom")) or call
        given_to = next((function[name] for name in ("arguments", "input", "args") if name in function), None)
        calls.append(tool_call(call.get("id"), function.get("name"), given_to))
    if legacy := mapping(given.get("function_call")):
        calls.append(tool_call(legacy.get("name"), legacy.get("name"), legacy.get("arguments")))
    return calls
