"""States, answers and messages of the tests, in as few words as they take."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_prime.traces.answers import Answer
from composer_prime.traces.states import Message, Tool, TraceState


def call(name: str, arguments: Any = "", id: str = "c1") -> dict[str, Any]:
    """One call; arguments that aren't text are made to JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def calls(*made: dict[str, Any], content: str = "") -> Message:
    """An assistant's message that calls."""
    return {"role": "assistant", "content": content, "tool_calls": list(made)}


def says(text: str) -> Message:
    """An assistant's message that only says something."""
    return {"role": "assistant", "content": text}


def tool(name: str, **properties: Any) -> Tool:
    """A tool with the schemas of its arguments."""
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


def state(question: str, action: Message, **known: Any) -> TraceState:
    """A state of session "s", turn 0, whose only message is `question`."""
    fields: dict[str, Any] = {"session": "s", "turn": 0, "parent": None, "tools": ()} | known
    return TraceState(messages=({"role": "user", "content": question},), action=action, **fields)


def answer(at: TraceState, teacher: str, action: Message | str, **known: Any) -> Answer:
    """What a teacher would have done; a model of no known family, named after it."""
    fields: dict[str, Any] = {"model": f"model-of-{teacher}"} | known
    return Answer(at.id, teacher, action=says(action) if isinstance(action, str) else action, **fields)


@dataclass(frozen=True)
class Listed:
    """A source of states that is a list."""

    listed: Sequence[TraceState]

    def states(self) -> Iterable[TraceState]:
        return self.listed
