"""What a teacher is asked at a decision point, under which key, and what counts as an answer. No I/O."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.redaction import Redactor, secret_values
from composer_prime.traces.states import Message, Tool, TraceState, digest


def sampling_id(teacher: TextTeacher) -> str:
    """Hex digits that teachers share which would answer alike: the same server, model and sampling."""
    return digest([teacher.base_url, teacher.model, teacher.max_tokens, teacher.temperature])


class Situation:
    """A decision point as teachers see it: without the author's thinking."""

    def __init__(self, state: TraceState) -> None:
        self.state = state
        self.id = state.id

    @property
    def messages(self) -> list[Message]:
        """As they are sent."""
        return [{k: v for k, v in message.items() if k != "reasoning_content"} for message in self.state.messages]

    @cached_property
    def sha256(self) -> str:
        """Of messages and tools."""
        return digest([self.messages, list(self.state.tools)])

    def body(self, model: str, **settings: Any) -> bytes:
        """A request of /v1/chat/completions, without secrets: it goes to somebody else's machine."""
        redactor = Redactor(secret_values(os.environ))
        body: dict[str, Any] = {"model": model, "messages": redactor.data(self.messages), **settings}
        if self.state.tools:
            body["tools"] = redactor.data(list(self.state.tools))
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


@dataclass(frozen=True)
class Question:
    """One situation put to one teacher."""

    situation: Situation
    teacher: TextTeacher

    @property
    def key(self) -> str:
        """Of the answer in the cache."""
        return digest([sampling_id(self.teacher), self.situation.sha256])

    def body(self) -> bytes:
        """The request."""
        teacher = self.teacher
        return self.situation.body(teacher.model, max_tokens=teacher.max_tokens, temperature=teacher.temperature)


class Unusable(Exception):
    """An answer that says no action; the text says why. `is_foreign`: it isn't a chat completion at all."""

    def __init__(self, why: str, *, is_foreign: bool = False) -> None:
        super().__init__(why)
        self.is_foreign = is_foreign


def read_choice(answer: Any) -> Mapping[str, Any]:
    """The first choice of a chat completion, which has a message. Raises Unusable."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        raise Unusable("it isn't a chat completion: no choices with a message", is_foreign=True)
    return choice


def read_action(choice: Mapping[str, Any], tools: Sequence[Tool]) -> Message:
    """The assistant's message of a choice, in the contract's form (`traces/states.py`).

    Raises Unusable: a call's arguments aren't a JSON object, its tool isn't offered, the answer was cut or is empty.
    """
    message = choice["message"]
    if choice.get("finish_reason") == "length":
        raise Unusable("it was cut at max_tokens")
    listed = message.get("tool_calls") or []
    if not isinstance(listed, list):
        raise Unusable("its tool_calls aren't a list")
    calls = [_call(found, number, tools) for number, found in enumerate(listed)]
    action: dict[str, Any] = {"role": "assistant", "content": _text(message.get("content"))}
    thinking = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thinking, str):
        action["reasoning_content"] = thinking
    if calls:
        action["tool_calls"] = calls
    elif not action["content"].strip():
        raise Unusable("it is empty")
    return action


def _call(found: Any, number: int, tools: Sequence[Tool]) -> dict[str, Any]:
    function = found.get("function") if isinstance(found, dict) else None
    if not isinstance(function, dict):
        raise Unusable("a tool call has no function")
    name, arguments = function.get("name"), function.get("arguments") or "{}"  # some write nothing for no arguments
    if name not in [tool["function"]["name"] for tool in tools]:
        raise Unusable(f"it calls {str(name)[:60]!r}, which isn't offered")
    try:
        is_object = isinstance(arguments, str) and isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise Unusable(f"its arguments for {name} aren't a JSON object")
    call_id = found.get("id") if isinstance(found.get("id"), str) else f"call_{number}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(content: Any) -> str:
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
