"""How often the policy does what teachers agree on, at decision points that it doesn't learn from.

Its answers are greedy and without thinking, as in its rollouts.
"""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from composer_prime import metrics
from composer_prime.bearer import SITE_TOKEN, site_token
from composer_prime.config.teachers import PairsConfig
from composer_prime.errors import TeacherError
from composer_prime.sites.embedded.stored import drawn
from composer_prime.traces.ask.client import ChatClient
from composer_prime.traces.ask.questions import Unusable, Wording, read_action, read_choice
from composer_prime.traces.pairs.actions import same_action
from composer_prime.traces.pairs.lessons import Lesson
from composer_prime.traces.states import calls_of

MAX_TOKENS = 1024
"""Of an answer; a longer one isn't the agreed action."""

TIMEOUT_S = 300.0
TRIES = 4
RETRY_WAIT_S = 0.5

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINKING = re.compile(r".*</think>", re.DOTALL)


class HeldOut:
    """The points, and the policy behind its site's own server. `aclose` it in the end.

    model  the policy's name there
    """

    def __init__(self, lessons: Sequence[Lesson], config: PairsConfig | None, base_url: str, model: str) -> None:
        self._lessons = lessons
        self._size = 0 if config is None else min(config.batch_size, len(lessons))
        site_token()  # in the variable, also where nobody handed one down
        self._client, self._wording = ChatClient(base_url, TIMEOUT_S, SITE_TOKEN), Wording()
        self._sampling = {
            "model": model,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "chat_template_kwargs": {"enable_thinking": False},
        }

    async def measure(self, step: int) -> dict[str, float]:
        """The agreement at a step's share of the points, which is also the step's reward; nothing without points.

        Raises TeacherError when the policy can't be asked.
        """
        places = drawn(len(self._lessons), self._size, step, "held out")
        found = await asyncio.gather(*(self._agrees(self._lessons[place]) for place in places))
        if not found:
            return {}
        by_name: dict[str, list[bool]] = defaultdict(list)
        for place, agrees in zip(places, found, strict=True):
            calls = calls_of(self._lessons[place].chosen)
            by_name[calls[0]["function"]["name"] if calls else "text"].append(agrees)
        shares = {f"{metrics.AGREEMENT}/{name}": fmean(agreeing) for name, agreeing in by_name.items()}
        return {metrics.AGREEMENT: fmean(found), metrics.ROLLOUT_REWARD: fmean(found), **shares}

    async def _agrees(self, lesson: Lesson) -> bool:
        choice = await self._choice(self._wording.body(lesson.state, self._sampling))
        try:
            action = None if choice is None else read_action(with_calls(choice), lesson.state.tools)
        except Unusable:
            return False
        return action is not None and same_action(action, lesson.chosen, lesson.state.tools, lesson.state.cwd)

    async def _choice(self, body: bytes) -> Mapping[str, Any] | None:
        """What the policy writes; None where the server refuses the question, such as one too long for it."""
        for attempt in range(TRIES):
            reply = await self._client.complete(body)
            if reply.why is None:
                try:
                    return read_choice(reply.answer)
                except Unusable as error:
                    raise TeacherError(f"the policy can't be asked what it would do: {error}") from None
            if reply.is_about_this and not reply.is_final:
                return None
            if not reply.is_passing:
                break
            if attempt + 1 < TRIES:
                await asyncio.sleep(RETRY_WAIT_S * 2**attempt if reply.pause_s is None else reply.pause_s)
        raise TeacherError(f"the policy can't be asked what it would do: {reply.why}")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()


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


def _call(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
        return {"function": {"name": found["name"], "arguments": json.dumps(found.get("arguments", {}))}}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
