"""One story in every format: a seeded session of an agent, and the files that each harness would have written of it."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.traces.ingest.claude_session import claude_session

MODEL = "teacher-8b"
TOOLS = {
    "run": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    "edit": {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}},
}


@dataclass(frozen=True)
class Turn:
    """One call of the model; each call has a result."""

    text: str
    thinking: str
    calls: list[tuple[str, str, dict[str, Any]]]
    results: list[str]


@dataclass(frozen=True)
class Story:
    system: str
    user: str
    turns: list[Turn]

    @property
    def actions(self) -> list[tuple[str, list[tuple[str, dict[str, Any]]]]]:
        return [(turn.text, [(name, given) for _, name, given in turn.calls]) for turn in self.turns]


def story(rng: random.Random, num_turns: int) -> Story:
    turns = []
    for number in range(num_turns - 1):
        calls = [
            (
                f"call_{number}_{place}",
                rng.choice(["run", "edit"]),
                {"command": f"make {rng.randrange(99)}", "line": place},
            )
            for place in range(rng.choice([1, 1, 2]))
        ]
        turns.append(Turn(f"Step {number}.", f"Why {number}?", calls, [f"out {rng.randrange(999)}" for _ in calls]))
    turns.append(Turn("Done.", "", [], []))
    return Story("You repair code.", "Repair it, café \u2028.", turns)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"


def _lines(values: list[Any]) -> bytes:
    return b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)


def chat_tools() -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
        for name, schema in TOOLS.items()
    ]


def chat_messages(told: Story) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": told.system},
        {"role": "user", "content": [{"type": "text", "text": told.user}]},
    ]
    for turn in told.turns:
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.thinking:
            message["reasoning_content"] = turn.thinking
        if turn.calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
                for id, name, given in turn.calls
            ]
        messages.append(message)
        for (id, _, _), said in zip(turn.calls, turn.results, strict=True):
            messages.append({"role": "tool", "tool_call_id": id, "content": said})
    return messages


def chat(told: Story) -> bytes:
    return _lines([{"messages": chat_messages(told), "tools": chat_tools(), "model": MODEL, "reward": 0.5}])


def atif(told: Story) -> bytes:
    steps: list[dict[str, Any]] = [
        {"source": "system", "message": told.system},
        {"source": "user", "message": told.user},
    ]
    for turn in told.turns:
        step: dict[str, Any] = {"source": "agent", "message": turn.text, "reasoning_content": turn.thinking}
        step["tool_calls"] = [
            {"tool_call_id": id, "function_name": name, "arguments": given} for id, name, given in turn.calls
        ]
        results = [
            {"source_call_id": id, "content": said} for (id, _, _), said in zip(turn.calls, turn.results, strict=True)
        ]
        step["observation"] = {"results": results}
        steps.append(step)
    return _json(
        {
            "schema_version": "ATIF-v1.6",
            "session_id": "s1",
            "agent": {"name": "a", "version": "1", "model_name": MODEL, "tool_definitions": chat_tools()},
            "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        }
    )


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """As verifiers spells calls."""
    calls = [{"id": call["id"], "type": "function", **call["function"]} for call in message.get("tool_calls", [])]
    return {**message, **({"tool_calls": calls} if calls else {})}


def verifiers_trace(told: Story) -> dict[str, Any]:
    nodes = [
        {
            "parent": number - 1 if number else None,
            "message": _flat(message),
            "sampled": message["role"] == "assistant",
            "timestamp": 1.0,
            "token_ids": [number],
            "mask": [message["role"] == "assistant"],
        }
        for number, message in enumerate(chat_messages(told))
    ]
    return {
        "version": 1,
        "id": "t1",
        "task": {"type": "T", "data": {}},
        "agent": {"config": {"model": MODEL}, "name": "solver"},
        "tools": [{"type": "function", "name": name, "parameters": schema} for name, schema in TOOLS.items()],
        "nodes": nodes,
        "calls": [],
        "rewards": {"right": {"score": 0.25, "weight": 2.0}, "late": None},
    }


def verifiers(told: Story) -> bytes:
    episode = {"id": "e1", "env": {"id": "x"}, "task": {"type": "T", "data": {}}, "ok": True}
    return _lines([{**episode, "traces": [verifiers_trace(told)]}])


def openenv(told: Story) -> bytes:
    messages = chat_messages(told)
    turns = [
        {
            "node_id": f"n{number}",
            "prompt_token_ids": [1],
            "completion_token_ids": [2],
            "per_token_logps": [-0.1],
            "loss_mask": [0, 1],
            "request": {"model": MODEL, "messages": messages[:number], "tools": chat_tools()},
            "response": {"model": MODEL, "choices": [{"message": message}], "usage": {"prompt_tokens": 3}},
            "metadata": {},
        }
        for number, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    return _json({"schema_version": 1, "turns": turns})


def response_items(told: Story) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": told.system}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": told.user}]},
    ]
    for turn in told.turns:
        if turn.thinking:
            items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": turn.thinking}]})
        items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": turn.text}]})
        for id, name, given in turn.calls:
            items.append({"type": "function_call", "call_id": id, "name": name, "arguments": json.dumps(given)})
        for (id, _, _), said in zip(turn.calls, turn.results, strict=True):
            items.append({"type": "function_call_output", "call_id": id, "output": said})
    return items


def responses(told: Story) -> bytes:
    return _json(response_items(told))


def codex(told: Story) -> bytes:
    lines = [
        ("session_meta", {"id": "c1", "cwd": "/home/dev", "instructions": told.system}),
        ("turn_context", {"model": MODEL, "cwd": "/home/dev"}),
    ]
    for item in response_items(told)[1:]:
        if item["type"] == "function_call_output" and lines[-1][1].get("type") != "function_call_output":
            lines.append(("event_msg", _token_count(len(lines))))
        lines.append(("response_item", item))
    lines.append(("event_msg", {"type": "agent_message", "message": "Done."}))
    lines.append(("event_msg", _token_count(len(lines))))
    return _lines([{"timestamp": "2026-11-20T10:00:00Z", "type": kind, "payload": payload} for kind, payload in lines])


def _token_count(tokens: int) -> dict[str, Any]:
    return {"type": "token_count", "info": {"last_token_usage": {"input_tokens": tokens, "output_tokens": 2}}}


def openhands(told: Story) -> bytes:
    events: list[dict[str, Any]] = [
        {"source": "agent", "action": "system", "args": {"content": told.system, "tools": chat_tools()}},
        {"source": "user", "action": "message", "args": {"content": told.user}},
        {"source": "agent", "action": "change_agent_state", "args": {"agent_state": "running"}},
    ]
    messages = [message for message in chat_messages(told) if message["role"] == "assistant"]
    for number, (turn, message) in enumerate(zip(told.turns, messages, strict=True)):
        response = {
            "id": f"r{number}",
            "model": MODEL,
            "choices": [{"message": message}],
            "usage": {"prompt_tokens": 4},
        }
        if not turn.calls:
            event = {"source": "agent", "action": "message", "args": {"content": turn.text}}
            events.append({**event, "tool_call_metadata": {"model_response": response}})
        metadata = [
            {"tool_call_id": id, "function_name": name, "model_response": response} for id, name, _ in turn.calls
        ]
        for (_, name, given), of in zip(turn.calls, metadata, strict=True):
            events.append({"source": "agent", "action": name, "args": given, "tool_call_metadata": of})
        for said, of in zip(turn.results, metadata, strict=True):
            seen = {"source": "environment", "observation": "run", "content": said, "cause": len(events)}
            events.append({**seen, "tool_call_metadata": of})
    return _json([{"id": number, **event} for number, event in enumerate(events)])


def swe_agent(told: Story) -> bytes:
    """Since 1.1: `query` is what the model was shown."""
    messages = chat_messages(told)
    places = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    steps = [
        {
            "action": turn.text,
            "observation": "\n".join(turn.results),
            "response": turn.text,
            "thought": turn.text,
            "state": {},
            "query": messages[:place],
        }
        for place, turn in zip(places, told.turns, strict=True)
    ]
    config = json.dumps({"agent": {"model": {"name": MODEL}}})
    return _json({"environment": "x", "trajectory": steps, "history": messages, "info": {}, "replay_config": config})


def mini_swe_agent(told: Story) -> bytes:
    messages = [
        {**message, "extra": {"response": {"model": MODEL, "usage": {"prompt_tokens": 1}}}}
        if message["role"] == "assistant"
        else message
        for message in chat_messages(told)
    ]
    messages.append({"role": "exit", "content": "Submitted"})
    info = {"model_stats": {"api_calls": 1}, "exit_status": "Submitted"}
    return _json({"info": info, "messages": messages, "trajectory_format": "mini-swe-agent-1"})


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
    return _json({"messages": blocks(told), "system": told.system, "model": MODEL, "tools": _anthropic_tools()})


def _anthropic_tools() -> list[dict[str, Any]]:
    return [{"name": name, "description": "", "input_schema": schema} for name, schema in TOOLS.items()]


def _stream(message: dict[str, Any], number: int) -> str:
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
    return _lines(
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
                "response": {"status_code": 200, "body": None, "body_raw": _stream(message, place)},
            }
            for place, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
    )


def litellm(told: Story) -> bytes:
    """LiteLLM's payloads: the messages beside the response, tools among the parameters."""
    return _json(
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
    return _json({"object": "list", "data": listed, "has_more": False})


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
    return _lines(lines)


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
    return _json(
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
    return _lines(
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
    return _json({"trace": {"id": "t"}, "observations": observations[::-1]})


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
    return _lines(runs)


def stream_json(told: Story) -> bytes:
    """Claude Code's printed lines: a line a block, with what the user asked, as `--replay-user-messages` prints it."""
    lines: list[dict[str, Any]] = [{"type": "system", "subtype": "init", "cwd": "/home/dev", "tools": ["run"]}]
    for number, message in enumerate(blocks(told)):
        if message["role"] == "user":
            lines.append({"type": "user", "message": message})
            continue
        for block in message["content"]:
            said = {"id": f"m{number}", "model": MODEL, "role": "assistant", "content": [block]}
            lines.append({"type": "assistant", "message": said})
    lines.append({"type": "result", "subtype": "success", "num_turns": 6})
    return _lines(
        [
            {**line, "parent_tool_use_id": None, "session_id": "s1", "uuid": f"u{number}"}
            for number, line in enumerate(lines)
        ]
    )


def qwen_code(told: Story) -> bytes:
    lines: list[dict[str, Any]] = [{"type": "user", "message": {"role": "user", "parts": [{"text": told.user}]}}]
    for turn in told.turns:
        parts: list[dict[str, Any]] = [{"text": turn.thinking, "thought": True}] if turn.thinking else []
        parts.append({"text": turn.text})
        parts += [{"functionCall": {"id": id, "name": name, "args": given}} for id, name, given in turn.calls]
        lines.append({"type": "assistant", "model": MODEL, "message": {"role": "model", "parts": parts}})
        lines.append({"type": "system", "subtype": "ui_telemetry", "systemPayload": {}})
        for (id, name, _), said in zip(turn.calls, turn.results, strict=True):
            part = {"functionResponse": {"id": id, "name": name, "response": {"output": said}}}
            lines.append({"type": "tool_result", "message": {"role": "user", "parts": [part]}})
    return _lines(
        [
            {"uuid": f"u{n}", "parentUuid": f"u{n - 1}" if n else None, "sessionId": "s1", "cwd": "/home/dev", **line}
            for n, line in enumerate(lines)
        ]
    )


def openhands_v1(told: Story) -> bytes:
    """A line an event; the calls of a response are actions of their own, the first with its text."""
    text = {"type": "text", "text": told.user, "cache_prompt": False}
    tools = [{"name": name, "description": "", "parameters": schema} for name, schema in TOOLS.items()]
    system = {"type": "text", "text": told.system}
    stats = {"usage_to_metrics": {"default": {"model_name": MODEL}}}
    events: list[dict[str, Any]] = [
        {"kind": "ConversationStateUpdateEvent", "source": "environment", "key": "stats", "value": stats},
        {"kind": "SystemPromptEvent", "source": "agent", "system_prompt": system, "tools": tools},
        {"kind": "MessageEvent", "source": "user", "llm_message": {"role": "user", "content": [text]}},
    ]
    for number, turn in enumerate(told.turns):
        said = [{"type": "text", "text": turn.text}]
        common = {"source": "agent", "llm_response_id": f"r{number}", "reasoning_content": turn.thinking or None}
        if not turn.calls:
            events.append({**common, "kind": "MessageEvent", "llm_message": {"role": "assistant", "content": said}})
        for place, (id, name, given) in enumerate(turn.calls):
            call = {"tool_call_id": id, "tool_call": {"id": id, "name": name, "arguments": json.dumps(given)}}
            thought = [] if place else said
            events.append({**common, "kind": "ActionEvent", "thought": thought, "tool_name": name, **call})
        for (id, _, _), result in zip(turn.calls, turn.results, strict=True):
            seen = {"content": [{"type": "text", "text": result}], "kind": "TerminalObservation"}
            events.append(
                {"kind": "ObservationEvent", "source": "environment", "tool_call_id": id, "observation": seen}
            )
    return _lines([{"id": f"e{number}", **event} for number, event in enumerate(events)])


def opencode(told: Story) -> bytes:
    """An export: a message for each of the first calls, then one that holds the others."""
    messages: list[dict[str, Any]] = [
        {"info": {"role": "user", "id": "m0"}, "parts": [{"type": "text", "text": told.user}]},
    ]
    parts: list[dict[str, Any]] = []
    for number, turn in enumerate(told.turns):
        parts.append({"type": "step-start"})
        parts += [{"type": "reasoning", "text": turn.thinking}] if turn.thinking else []
        parts.append({"type": "text", "text": turn.text})
        for (id, name, given), said in zip(turn.calls, turn.results, strict=True):
            state = {"status": "completed", "input": given, "output": said}
            parts.append({"type": "tool", "tool": name, "callID": id, "state": state})
        parts.append({"type": "step-finish", "reason": "stop"})
        if number < 3 or number == len(told.turns) - 1:
            messages.append({"info": {"role": "assistant", "modelID": MODEL, "tokens": {}}, "parts": parts})
            parts = []
    return _json({"info": {"id": "ses_1", "directory": "/home/dev"}, "messages": messages})


WRITERS: Mapping[str, tuple[str, Callable[[Story], bytes]]] = {
    "atif": ("atif", atif),
    "openenv": ("openenv", openenv),
    "verifiers": ("verifiers", verifiers),
    "swe-agent": ("swe-agent", swe_agent),
    "mini-swe-agent": ("swe-agent", mini_swe_agent),
    "codex": ("codex", codex),
    "openhands": ("openhands", openhands),
    "openai-responses": ("openai-responses", responses),
    "openai-chat": ("openai-chat", chat),
    "anthropic-messages": ("anthropic-messages", anthropic),
    "proxy-log": ("api-log", proxy_log),
    "litellm": ("api-log", litellm),
    "stored-completions": ("api-log", stored_completions),
    "otel": ("otel-spans", otel),
    "openllmetry": ("otel-spans", openllmetry),
    "openinference": ("otel-spans", openinference),
    "langfuse": ("langfuse", langfuse),
    "langsmith": ("langsmith", langsmith),
    "claude-stream-json": ("claude-stream-json", stream_json),
    "qwen-code": ("qwen-code", qwen_code),
    "openhands-v1": ("openhands-v1", openhands_v1),
    "opencode": ("opencode", opencode),
}
"""By name: the format that a file is found to be, and what writes it."""
NO_SYSTEM = ("claude-stream-json", "qwen-code", "opencode")
"""Those that don't say what the system's message was."""


def files_of(name: str, seed: int, num_turns: int = 6) -> dict[str, bytes]:
    """A session's files by path, the main one first."""
    rng = random.Random(seed)
    if name == "claude-code":
        session = claude_session(30, seed)
        return {"s.jsonl": session.main} | {f"s/subagents/{file}": data for file, data in session.subagents.items()}
    return {"s.json": WRITERS[name][1](story(rng, num_turns))}
