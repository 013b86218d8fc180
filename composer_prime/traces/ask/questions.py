"""What a teacher is asked at a decision point, under which key, and what counts as an answer. No I/O."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.redaction import Redactor, secret_values
from composer_prime.traces.states import Message, Shared, Tool, TraceState, canonical, digest, text_of


def sampling_id(teacher: TextTeacher) -> str:
    """Hex digits that teachers share which would answer alike: the same server, model and sampling."""
    return digest(teacher.identity())


def key_of(sampling: str, question: str) -> str:
    """Of a question (`TraceState.question`) put to a teacher, and of its answer: 64 hex digits."""
    return hashlib.sha256(f"{sampling} {question}".encode()).hexdigest()


class Wording:
    """Messages and tools as they are sent: JSON without thinking and without secrets, made once for all states."""

    def __init__(self) -> None:
        self._redactor = Redactor(secret_values(os.environ))
        self._text = Shared(self._word, len)

    def request(self, state: TraceState, teacher: TextTeacher) -> bytes:
        """The body that a teacher gets; somebody else's machine does."""
        return self.body(state, teacher.sampling(), teacher.prompt_cache is not None)

    def body(self, state: TraceState, sampling: Mapping[str, Any], cached: bool = False) -> bytes:
        """A request's body; `cached`: its last message asks Anthropic's models to cache what was said so far."""
        messages = [self._text(message) for message in state.messages]
        if cached:
            messages = _marked(messages)
        body = _json(sampling)[:-1] + b',"messages":[' + b",".join(messages) + b"]"
        if state.tools:
            body += b',"tools":[' + b",".join(map(self._text, state.tools)) + b"]"
        return body + b"}"

    def _word(self, value: Mapping[str, Any]) -> bytes:
        return _json(self._redactor.data({k: v for k, v in value.items() if k != "reasoning_content"}))


def frame_bytes(teacher: TextTeacher) -> int:
    """Bytes of a request at most, besides its messages and tools."""
    frame = {**teacher.sampling(), "messages": [], "tools": []}
    return len(_json(frame)) + (len(_json(_MARK)) + 32 if teacher.prompt_cache else 0)


_MARK = {"type": "text", "cache_control": {"type": "ephemeral"}}


def _marked(messages: list[bytes]) -> list[bytes]:
    """With `cache_control` in the last message that has a text: an empty one can't carry it."""
    for place in range(len(messages) - 1, -1, -1):
        message = json.loads(messages[place])
        if text := text_of(message):
            marked = _json({**message, "content": [{**_MARK, "text": text}]})
            return [*messages[:place], marked, *messages[place + 1 :]]
    return messages


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class Unusable(Exception):
    """An answer that says no action; the text says why."""


def read_choice(answer: Any) -> Mapping[str, Any]:
    """The first choice of a chat completion, which has a message. Raises Unusable."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        raise Unusable("it isn't a chat completion: no choices with a message")
    return choice


def read_action(choice: Mapping[str, Any], tools: Sequence[Tool]) -> Message:
    """The assistant's message of a choice, in the contract's form (`traces/states.py`).

    Raises Unusable: a call's arguments aren't a JSON object, its tool isn't offered, the answer was cut or is empty.
    """
    message = choice["message"]
    if choice.get("finish_reason") == "length":
        raise Unusable("it was cut at max_tokens: raise that, or lower reasoning_effort")
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
        arguments = canonical(arguments) if isinstance(arguments, dict) else arguments  # some give them as an object
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
