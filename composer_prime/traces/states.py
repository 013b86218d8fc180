"""A decision point of a stored session: what the author saw, which tools it had, and what it did.

Ingestion makes them, teachers are asked at them, pairs and training samples are made of them. Messages and tools are
those of OpenAI's chat completions, as plain JSON values, so that they can be sent as they are.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

Message: TypeAlias = Mapping[str, Any]
"""One chat message.

role               system, user, assistant or tool
content            text; "" where there is none
reasoning_content  an assistant's thinking, where it is known; never sent to a teacher
tool_calls         an assistant's calls: {"id", "type": "function", "function": {"name", "arguments": JSON text}}
tool_call_id       of a tool's message: the call that it answers
"""

Tool: TypeAlias = Mapping[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters": JSON schema}}"""


Made = TypeVar("Made")


@dataclass(frozen=True)
class TraceState:
    """One call of a model in a session.

    session   id of the stored session
    turn      its number among the session's calls, from 0, in the order of the file
    parent    turn of the call before it on its branch; None: the branch's first
    messages  what the author saw, oldest first; without thinking
    tools     which it could call; where the log doesn't list them, those that it had called by then, this call included
    action    the assistant's message that came of it, thinking included where it is known
    author    name of the model that acted; None: the format doesn't say
    reward    of the whole session; None: unknown
    has_tools whether the log lists the tools, or ingestion was given them; inferred ones are no part of the question
    cwd       the session's working folder, an absolute path; None: unknown
    """

    session: str
    turn: int
    parent: int | None
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    action: Message
    author: str | None = None
    reward: float | None = None
    has_tools: bool = True
    cwd: str | None = None

    @cached_property
    def question(self) -> str:
        """sha256 in hex of what is asked here: the messages, and the tools unless they are inferred."""
        tools = [said(tool).sha256 for tool in self.tools] if self.has_tools else None
        return digest([[said(message).sha256 for message in self.messages], tools])

    @property
    def id(self) -> str:
        """The question's first 16 hex digits: the same question has the same id in every session."""
        return self.question[:16]


class States(Protocol):
    """Where decision points come from: a store of traces, or a list in a test."""

    def states(self) -> Iterable[TraceState]: ...


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values have equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """sha256 of a JSON value's canonical text, in hex."""
    return hashlib.sha256(canonical(value).encode("utf-8", "surrogatepass")).hexdigest()


class Said(NamedTuple):
    """A message or tool as its canonical text: sha256 in hex, and bytes."""

    sha256: str
    num_bytes: int


class Shared(Generic[Made]):
    """What was made of messages and tools, once for all states that share them, as those of one session do.

    make   makes it of a message or tool, which never changes after
    weigh  the bytes that it stands for; beyond `max_bytes` of them in all, everything is made anew
    """

    def __init__(self, make: Callable[[Any], Made], weigh: Callable[[Made], int], max_bytes: int = 2**25) -> None:
        self._make, self._weigh, self._max_bytes = make, weigh, max_bytes
        self._made: dict[int, tuple[Any, Made]] = {}
        self._num_bytes = 0

    def __call__(self, value: Any) -> Made:
        found = self._made.get(id(value))  # no id comes again while its value is held
        if found is None:
            found = value, self._make(value)
            if self._num_bytes > self._max_bytes:
                self._made.clear()
                self._num_bytes = 0
            self._made[id(value)] = found
            self._num_bytes += self._weigh(found[1])
        return found[1]


def _said(value: Any) -> Said:
    text = canonical(value).encode("utf-8", "surrogatepass")
    return Said(hashlib.sha256(text).hexdigest(), len(text))


said = Shared(_said, lambda one: one.num_bytes)
"""`Said` of a message or tool."""


def text_of(message: Message) -> str:
    """A message's content as text."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    """The tool calls of an assistant's message."""
    return message.get("tool_calls") or ()
