"""Whether a teacher can tell the student anything: where it is sure, and does what the author did, nobody is asked.

The student answers without thinking, as an embedded site's policy does in its rollouts. Its uncertainty is its mean
entropy a token over its own greedy answer, read off `top_logprobs`.
"""

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_prime.errors import BadInput, TeacherError
from composer_prime.traces.ask.client import ChatClient
from composer_prime.traces.ask.questions import Unusable, Wording, read_action, read_choice
from composer_prime.traces.states import Message, TraceState

TOP_LOGPROBS = 20
"""Likeliest tokens that are asked for at each place: as many as OpenAI's API and a vLLM server give."""

MAX_TOKENS = 1024
"""Of a student's answer; a longer one isn't the author's action."""

TIMEOUT_S = 300.0
TRIES = 4
RETRY_WAIT_S = 0.5

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINKING = re.compile(r".*</think>", re.DOTALL)


@dataclass(frozen=True)
class Reading:
    """What the student would do, None where that is no action, and its mean entropy a token in nats."""

    action: Message | None
    entropy: float


class Student:
    """The policy behind an OpenAI-compatible server. `close` it in the end.

    wording  of what is sent
    model    its name there; None: `find` it
    key_var  the environment variable with the server's key
    """

    def __init__(
        self, base_url: str, wording: Wording, *, model: str | None = None, key_var: str | None = None
    ) -> None:
        self._wording = wording
        self._client = ChatClient(base_url, TIMEOUT_S, key_var)
        self._model = model

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def find(self) -> None:
        """Learn its name. Raises BadInput when it isn't there."""
        self._model = await self._client.first_model()

    async def read(self, state: TraceState) -> Reading | None:
        """What it would do there; None where the server refuses the question, such as one too long for it.

        Raises TeacherError when it can't be asked, and BadInput when it gives no logprobs: without a student that can
        be read, everything would be asked.
        """
        assert self._model is not None  # find has set it
        sampling = {
            "model": self._model,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        body = self._wording.body(state, sampling)
        for attempt in range(TRIES):
            reply = await self._client.complete(body)
            if reply.why is None:
                return _read(reply.answer, state)
            if reply.is_about_this and not reply.is_final:
                return None
            if not reply.is_passing:
                break
            if attempt + 1 < TRIES:
                await asyncio.sleep(RETRY_WAIT_S * 2**attempt if reply.pause_s is None else reply.pause_s)
        raise TeacherError(f"the student can't be asked: {reply.why}; start the same command again when it is back")


def mean_entropy(content: Sequence[Mapping[str, Any]]) -> float:
    """Mean over tokens of their entropies, in nats, from `top_logprobs`; all tokens beside those count as one.

    Raises BadInput when a token has none.
    """
    entropies = []
    for entry in content:
        logprobs = [float(one["logprob"]) for one in entry.get("top_logprobs") or ()]
        if not logprobs:
            raise BadInput("the student gives no top_logprobs, so its uncertainty isn't known: leave --student out")
        rest = 1.0 - sum(map(math.exp, logprobs))
        entropies.append(-sum(math.exp(one) * one for one in logprobs) - (rest * math.log(rest) if rest > 0 else 0.0))
    return sum(entropies) / len(entropies) if entropies else math.inf


def with_calls(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """The choice with its calls, also where its text spells them: Qwen's models do, and not every server parses it."""
    message = choice["message"]
    content = message.get("content")
    if message.get("tool_calls") or not isinstance(content, str):
        return choice
    content = _THINKING.sub("", content)
    calls = [call for call in map(_call, _CALL.findall(content)) if call is not None]
    said = {**message, "content": _CALL.sub("", content).strip(), "tool_calls": calls}
    return {**choice, "message": said}


def _read(answer: Any, state: TraceState) -> Reading:
    try:
        choice = read_choice(answer)
    except Unusable as error:
        raise TeacherError(f"the student can't be asked: {error}") from None
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    entropy = mean_entropy(content if isinstance(content, list) else [{}])
    try:
        return Reading(read_action(with_calls(choice), state.tools), entropy)
    except Unusable:
        return Reading(None, entropy)


def _call(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
        return {"function": {"name": found["name"], "arguments": json.dumps(found.get("arguments", {}))}}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
