"""A seeded session of an agent, as messages of a chat."""

import json
import random
from dataclasses import dataclass
from typing import Any

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


def document(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"


def json_lines(values: list[Any]) -> bytes:
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
