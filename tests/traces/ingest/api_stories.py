"""The same story as calls of a model's API, and as what tracing tools keep of them."""

import json
from typing import Any

from tests.traces.ingest.story import MODEL, TOOLS, Story, chat_messages, chat_tools, document, json_lines


def _chat_calls(told: Story) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """What each call of the model was shown, and its answer."""
    messages = chat_messages(told)
    return [(messages[:place], message) for place, message in enumerate(messages) if message["role"] == "assistant"]


def blocks(told: Story) -> list[dict[str, Any]]:
    """Anthropic's messages, the system's apart."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": told.user}]
    for turn in told.turns:
        content: list[dict[str, Any]] = [{"type": "thinking", "thinking": turn.thinking, "signature": "s"}]
        content = content if turn.thinking else []
        content.append({"type": "text", "text": turn.text})
        content += [{"type": "tool_use", "id": id, "name": name, "input": given} for id, name, given in turn.calls]
        messages.append({"role": "assistant", "content": content})
        results = [
            {"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": said}]}
            for (id, _, _), said in zip(turn.calls, turn.results, strict=True)
        ]
        messages += [{"role": "user", "content": results}] if results else []
    return messages


def anthropic(told: Story) -> bytes:
    return document({"messages": blocks(told), "system": told.system, "model": MODEL, "tools": _anthropic_tools()})


def _anthropic_tools() -> list[dict[str, Any]]:
    return [{"name": name, "description": "", "input_schema": schema} for name, schema in TOOLS.items()]


def stream(message: dict[str, Any], number: int) -> str:
    """Anthropic's events of a message, its texts and arguments in pieces."""
    start = {"id": f"m{number}", "model": MODEL, "role": "assistant", "content": [], "usage": {"input_tokens": 3}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}, {"type": "ping"}]
    for place, block in enumerate(message["content"]):
        field, kind = {"thinking": ("thinking", "thinking_delta"), "text": ("text", "text_delta")}.get(
            block["type"], ("partial_json", "input_json_delta")
        )
        text = block[field] if field in block else json.dumps(block["input"])
        empty = {**block, **({field: ""} if field in block else {"input": {}})}
        events.append({"type": "content_block_start", "index": place, "content_block": empty})
        for piece in (text[:4], text[4:]):
            events.append({"type": "content_block_delta", "index": place, "delta": {"type": kind, field: piece}})
        events.append({"type": "content_block_stop", "index": place})
    events += [{"type": "message_delta", "usage": {"output_tokens": 2}}, {"type": "message_stop"}]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def proxy_log(told: Story) -> bytes:
    """A proxy in front of Anthropic's API: a line a call, the response as it was streamed."""
    messages = blocks(told)
    return json_lines(
        [
            {
                "request": {
                    "url": "https://x/v1/messages",
                    "body": {
                        "model": MODEL,
                        "system": told.system,
                        "messages": messages[:place],
                        "tools": _anthropic_tools(),
                    },
                },
                "response": {"status_code": 200, "body": None, "body_raw": stream(message, place)},
            }
            for place, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
    )


def litellm(told: Story) -> bytes:
    """LiteLLM's payloads: the messages beside the response, tools among the parameters."""
    return document(
        [
            {
                "id": f"c{number}",
                "call_type": "acompletion",
                "messages": shown,
                "model_parameters": {"tools": chat_tools()},
                "response": {"id": f"c{number}", "model": MODEL, "choices": [{"message": message}]},
            }
            for number, (shown, message) in enumerate(_chat_calls(told))
        ]
    )


def stored_completions(told: Story) -> bytes:
    """OpenAI's list of stored completions, each with the messages that it answers."""
    listed = [
        {
            "object": "chat.completion",
            "id": f"c{number}",
            "model": MODEL,
            "tools": chat_tools(),
            "messages": shown,
            "choices": [{"index": 0, "message": message}],
        }
        for number, (shown, message) in enumerate(_chat_calls(told))
    ]
    return document({"object": "list", "data": listed, "has_more": False})


def _otel_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        parts = [{"type": "tool_call_response", "id": message["tool_call_id"], "response": content}]
    else:
        text = content if isinstance(content, str) else content[0]["text"]
        parts = (
            [{"type": "reasoning", "content": message["reasoning_content"]}] if "reasoning_content" in message else []
        )
        parts.append({"type": "text", "content": text})
    for call in message.get("tool_calls", []):
        parts.append({"type": "tool_call", "id": call["id"], **_named(call)})
    return {"role": message["role"], "parts": parts}


def _named(call: dict[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}


def _otlp(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in attributes.items()]


def otel(told: Story) -> bytes:
    """An OTLP exporter's line a batch: the call's span beside a tool's."""
    lines = []
    for number, (shown, message) in enumerate(_chat_calls(told)):
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": MODEL,
            "gen_ai.system_instructions": json.dumps([{"type": "text", "content": told.system}]),
            "gen_ai.input.messages": json.dumps([_otel_parts(one) for one in shown[1:]]),
            "gen_ai.output.messages": json.dumps([{**_otel_parts(message), "finish_reason": "stop"}]),
            "gen_ai.tool.definitions": json.dumps(chat_tools()),
        }
        spans = [
            {"traceId": "t", "spanId": f"s{number}", "name": "chat", "attributes": _otlp(attributes)},
            {"traceId": "t", "spanId": f"x{number}", "name": "tool", "attributes": _otlp({"gen_ai.tool.name": "run"})},
        ]
        lines.append({"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": spans}]}]})
    return json_lines(lines)


def _numbered(head: str, messages: list[dict[str, Any]], wrapped: bool) -> dict[str, Any]:
    """Attributes of messages one by one: OpenLLMetry's, or OpenInference's, which wrap each in a name."""
    found: dict[str, Any] = {}
    for number, message in enumerate(messages):
        at = f"{head}.{number}" + (".message" if wrapped else "")
        content = message["content"]
        found[f"{at}.role"] = message["role"]
        found[f"{at}.content"] = content if isinstance(content, str) else content[0]["text"]
        if "tool_call_id" in message:
            found[f"{at}.tool_call_id"] = message["tool_call_id"]
        for place, call in enumerate(message.get("tool_calls", [])):
            here = f"{at}.tool_calls.{place}" + (".tool_call" if wrapped else "")
            found[f"{here}.id"] = call["id"]
            inner = f"{here}.function" if wrapped else here
            found |= {f"{inner}.{name}": value for name, value in call["function"].items()}
    return found


def openllmetry(told: Story) -> bytes:
    return document(
        [
            {
                "name": "openai.chat",
                "context": {"span_id": f"s{number}"},
                "attributes": {"gen_ai.request.model": MODEL}
                | _numbered("gen_ai.prompt", shown, False)
                | _numbered("gen_ai.completion", [message], False),
            }
            for number, (shown, message) in enumerate(_chat_calls(told))
        ]
    )


def openinference(told: Story) -> bytes:
    tools = {f"llm.tools.{n}.tool.json_schema": json.dumps(tool) for n, tool in enumerate(chat_tools())}
    return json_lines(
        [
            {
                "name": "ChatCompletion",
                "attributes": {"openinference.span.kind": "LLM", "llm.model_name": MODEL, **tools}
                | _numbered("llm.input_messages", shown, True)
                | _numbered("llm.output_messages", [message], True),
            }
            for shown, message in _chat_calls(told)
        ]
    )


def langfuse(told: Story) -> bytes:
    """A trace whose observations stand newest first, inputs as JSON texts."""
    observations = [
        {
            "id": f"o{number}",
            "type": "GENERATION",
            "startTime": f"2026-11-20T10:00:{number:02}Z",
            "model": MODEL,
            "input": json.dumps({"messages": shown, "tools": chat_tools()}),
            "output": json.dumps(message),
        }
        for number, (shown, message) in enumerate(_chat_calls(told))
    ]
    observations.append({"id": "o", "type": "SPAN", "startTime": "2026-11-20T10:00:00Z", "input": "Go."})
    return document({"trace": {"id": "t"}, "observations": observations[::-1]})


_LANGCHAIN = {"system": "SystemMessage", "user": "HumanMessage", "assistant": "AIMessage", "tool": "ToolMessage"}


def _langchain(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    fields: dict[str, Any] = {"content": content if isinstance(content, str) else content[0]["text"]}
    if "tool_call_id" in message:
        fields["tool_call_id"] = message["tool_call_id"]
    if message["role"] == "assistant":
        calls = [{"id": call["id"], **_named(call)} for call in message.get("tool_calls", [])]
        fields["tool_calls"] = [{"args": call.pop("arguments"), **call, "type": "tool_call"} for call in calls]
    name = ["langchain", "schema", "messages", _LANGCHAIN[message["role"]]]
    return {"lc": 1, "type": "constructor", "id": name, "kwargs": fields}


def langsmith(told: Story) -> bytes:
    runs: list[dict[str, Any]] = [{"id": "r", "run_type": "chain", "start_time": "t", "inputs": {"input": "Go."}}]
    for number, (shown, message) in enumerate(_chat_calls(told)):
        generation = {"text": message["content"], "type": "ChatGeneration", "message": _langchain(message)}
        runs.append(
            {
                "id": f"r{number}",
                "run_type": "llm",
                "start_time": "t",
                "extra": {"invocation_params": {"tools": chat_tools(), "model": MODEL}},
                "inputs": {"messages": [[_langchain(one) for one in shown]]},
                "outputs": {"generations": [[generation]], "llm_output": None},
            }
        )
    return json_lines(runs)
