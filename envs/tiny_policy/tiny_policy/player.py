"""The scripted player that a taskset brings, and the messages that it reads and says.

    def play(self, task: vf.Task, messages: list[dict], rng: random.Random) -> dict | str

It must depend on these three alone: it is asked again for the same turn with a hint, and by the report.
"""

import json
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf

from composer_prime.errors import EnvError

Message = dict[str, Any]
"""As a chat completion has it: role, content, tool_calls, and of a tool's answer name and tool_call_id."""

_SHOWN = 80
"""Characters of a wrong value that an error shows."""


@dataclass(frozen=True)
class Player:
    """A taskset's `play`, its answers checked.

    taskset_id  for the messages.
    function    bound: takes the task, the messages so far, and what it may draw from.
    """

    taskset_id: str
    function: Callable[[vf.Task, list[Message], random.Random], Any]

    @classmethod
    def of(cls, taskset: vf.Taskset, taskset_id: str) -> "Player":
        """Raises EnvError where the taskset brings none."""
        function = getattr(taskset, "play", None)
        if not callable(function):
            raise EnvError(
                f"taskset {taskset_id!r} ({type(taskset).__name__}) has no method `play`, and a policy is made from "
                "what it plays: add `def play(self, task, messages, rng)` to that class, as docs/environments.md shows"
            )
        return cls(taskset_id, function)

    def next_turn(self, task: vf.Task, messages: Sequence[Message], rng: random.Random) -> Message:
        """The assistant's next message. Raises EnvError for a play that raises, or returns something else."""
        try:
            said = self.function(task, [_as_played(message) for message in messages], rng)
        except Exception as error:  # the taskset's own code
            frame = traceback.extract_tb(error.__traceback__)[-1]
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise EnvError(
                f"taskset {self.taskset_id!r}: play raises {cause} ({frame.filename}, line {frame.lineno}): repair it"
            ) from error
        fault = _fault(said)
        if fault is not None:
            raise EnvError(
                f"taskset {self.taskset_id!r}: play returned {_short(said)}, {fault}: return a text, which ends the "
                'rollout, or {"content": TEXT, "tool_calls": [{"name": TOOL, "arguments": {...}}]}'
            )
        return _as_sent(said, len(messages))


def _as_played(message: Message) -> Message:
    """A message as `play` is shown it: calls in the form in which it makes them."""
    shown = {key: value for key, value in message.items() if key in ("role", "content", "name")}
    if message.get("tool_calls"):
        calls = [call["function"] for call in message["tool_calls"]]
        shown["tool_calls"] = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls]
    return shown


def _as_sent(said: str | Mapping[str, Any], place: int) -> Message:
    """What a play returned, as an assistant's message of a chat completion."""
    if isinstance(said, str):
        return {"role": "assistant", "content": said}
    message: Message = {"role": "assistant", "content": said.get("content") or ""}
    calls = [
        {
            "id": f"call{place:03}{number:03}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
        }
        for number, call in enumerate(said.get("tool_calls") or [])
    ]
    return {**message, "tool_calls": calls} if calls else message


def _fault(said: Any) -> str | None:
    """What is wrong with a play's answer."""
    if isinstance(said, str):
        return None
    if not isinstance(said, Mapping):
        return f"which is of type {type(said).__name__}"
    if unknown := sorted(map(str, said.keys() - {"role", "content", "tool_calls"})):
        return f"whose key {unknown[0]!r} is none of content and tool_calls"
    if said.get("role", "assistant") != "assistant":
        return "whose role isn't assistant"
    if not isinstance(said.get("content") or "", str):
        return "whose content isn't a text"
    calls = said.get("tool_calls") or []
    if not isinstance(calls, list):
        return "whose tool_calls aren't a list"
    return next((fault for call in calls if (fault := _call_fault(call)) is not None), None)


def _call_fault(call: Any) -> str | None:
    if not isinstance(call, Mapping) or set(call) != {"name", "arguments"}:
        return f"whose call {_short(call)} hasn't just name and arguments"
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], Mapping):
        return f"whose call {_short(call)} hasn't a text as its name and a dict as its arguments"
    try:
        json.dumps(call["arguments"])
    except (TypeError, ValueError) as error:
        return f"whose arguments can't be written as JSON ({error})"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
