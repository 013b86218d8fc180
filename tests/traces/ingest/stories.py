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
}
"""By name: the format that a file is found to be, and what writes it."""


def files_of(name: str, seed: int, num_turns: int = 6) -> dict[str, bytes]:
    """A session's files by path, the main one first."""
    rng = random.Random(seed)
    if name == "claude-code":
        session = claude_session(30, seed)
        return {"s.jsonl": session.main} | {f"s/subagents/{file}": data for file, data in session.subagents.items()}
    return {"s.json": WRITERS[name][1](story(rng, num_turns))}
