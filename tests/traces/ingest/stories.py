"""One story in every format: the files that each harness would have written of a session."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.traces.ingest.api_stories import (
    anthropic,
    blocks,
    langfuse,
    langsmith,
    litellm,
    openinference,
    openllmetry,
    otel,
    proxy_log,
    stored_completions,
)
from tests.traces.ingest.claude_session import claude_session
from tests.traces.ingest.story import MODEL, TOOLS, Story, chat_messages, chat_tools, document, json_lines, story


def chat(told: Story) -> bytes:
    return json_lines([{"messages": chat_messages(told), "tools": chat_tools(), "model": MODEL, "reward": 0.5}])


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
    return document(
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
    return json_lines([{**episode, "traces": [verifiers_trace(told)]}])


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
    return document({"schema_version": 1, "turns": turns})


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
    return document(response_items(told))


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
    return json_lines(
        [{"timestamp": "2026-11-20T10:00:00Z", "type": kind, "payload": payload} for kind, payload in lines]
    )


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
    return document([{"id": number, **event} for number, event in enumerate(events)])


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
    return document({"environment": "x", "trajectory": steps, "history": messages, "info": {}, "replay_config": config})


def mini_swe_agent(told: Story) -> bytes:
    messages = [
        {**message, "extra": {"response": {"model": MODEL, "usage": {"prompt_tokens": 1}}}}
        if message["role"] == "assistant"
        else message
        for message in chat_messages(told)
    ]
    messages.append({"role": "exit", "content": "Submitted"})
    info = {"model_stats": {"api_calls": 1}, "exit_status": "Submitted"}
    return document({"info": info, "messages": messages, "trajectory_format": "mini-swe-agent-1"})


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
    return json_lines(
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
    return json_lines(
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
    return json_lines([{"id": f"e{number}", **event} for number, event in enumerate(events)])


def opencode(told: Story) -> bytes:
    """An export: a message for each of the first calls, then one that holds the others."""
    messages: list[dict[str, Any]] = [
        {"info": {"role": "user", "id": "m0"}, "parts": [{"type": "text", "text": told.user}]}
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
    return document({"info": {"id": "ses_1", "directory": "/home/dev"}, "messages": messages})


WRITERS: Mapping[str, tuple[str, Callable[[Story], bytes]]] = {
    "atif": ("atif", atif),
    "openenv": ("api-log", openenv),
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
