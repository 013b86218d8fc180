"""Rollouts in which a teacher takes over from the policy: at one turn, under the hint for it, or at every turn.

The turns before that one are said again as they were. A probe is played by the environment itself; which model answers
is decided where verifiers' client asks for a turn, by the name of the model that it asks.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import verifiers.v1 as vf

from composer_prime.errors import TeacherError
from composer_prime.teachers.gate import Gate
from composer_prime.teachers.served import ServedModel
from composer_prime.teachers.wire import NotSampled

Sampler = Callable[[Sequence[int], Any], Awaitable[list[int]]]
"""From a prompt's token ids and the request for a turn to what the teacher says."""

PROBING: ContextVar[bool] = ContextVar("probing", default=False)
"""True where a probe is played: it is no rollout of the run."""

PROBE_TURN_S = 300.0
"""Seconds a teacher may take for a turn that it plays."""

MOST_SAID = 1024
"""Tokens of a probe's turn where the run has no limit."""

logger = logging.getLogger(__name__)

_probes: dict[str, "Probe"] = {}
_numbers = itertools.count()


@dataclass
class Probe:
    """One rollout to be played.

    model     the policy's name at its server
    teacher   who takes over
    said      token ids of the policy's turns before that
    hint_ids  what the teacher alone is shown; [] with `tail` 0: the teacher takes every turn
    tail      tokens of the prompt after the hint
    turn      turns asked for so far
    """

    model: str
    teacher: Sampler
    said: Sequence[Sequence[int]] = ()
    hint_ids: Sequence[int] = ()
    tail: int = 0
    turn: int = 0

    async def answer(self, generate: Callable[..., Awaitable[dict[str, Any]]], asked: dict[str, Any]) -> dict[str, Any]:
        """One turn, as renderers' client gives it."""
        turn, self.turn = self.turn, self.turn + 1
        if turn < len(self.said):
            return await generate(**asked | _standing_in(asked, self.said[turn]))
        if turn > len(self.said) and self.tail:
            return await generate(**asked | {"model": self.model})
        prompt = list(asked["prompt_ids"])
        place = len(prompt) - self.tail
        told = await self.teacher([*prompt[:place], *self.hint_ids, *prompt[place:]], asked)
        return await generate(**asked | _standing_in(asked, told))


def sampler(teacher: ServedModel, gate: Gate) -> Sampler:
    """What a served teacher says; where it gives no text its gate is told, and it isn't asked again."""

    async def sample(token_ids: Sequence[int], asked: Any) -> list[int]:
        sampling = asked.get("sampling_params") or {}
        stops, room = asked["renderer"].get_stop_token_ids(), sampling.get("max_tokens") or MOST_SAID
        try:
            async with asyncio.timeout(PROBE_TURN_S):
                return await teacher.sample(token_ids, room, stops, sampling.get("temperature", 1.0))
        except TimeoutError:
            raise TeacherError(f"it said nothing within {PROBE_TURN_S:g} s") from None
        except NotSampled as error:
            logger.warning("teacher=%s can't play: %s", gate.name, error)
            gate.can_play = False
            raise

    return sample


async def play(env: Any, task: vf.Task, trace: vf.Trace, probe: Probe) -> float | None:
    """What a probe of a trace's task earns; None where it failed."""
    config: Any = trace.agent.config  # pyright: ignore[reportOptionalMemberAccess] (set where an agent played)
    with _listening(probe) as name:
        context = vf.ModelContext(model=name, client=config.client, sampling=config.sampling)
        token = PROBING.set(True)
        try:
            async with env.stage():
                episode = await env.run_slot(env.slots(task)[0], context)
        finally:
            PROBING.reset(token)
    if not episode.ok or probe.turn <= len(probe.said):
        return None
    reward = float(sum(each.reward for each in episode.traces if each.agent is None or each.agent.trainable))
    return reward if math.isfinite(reward) else None


@contextlib.contextmanager
def _listening(probe: Probe) -> Iterator[str]:
    from renderers import client

    plain = client.generate
    if not hasattr(plain, "probes"):

        async def generate(**asked: Any) -> dict[str, Any]:
            found = _probes.get(asked["model"])
            return await (plain(**asked) if found is None else found.answer(plain, asked))

        generate.probes = _probes  # pyright: ignore[reportFunctionMemberAccess]
        client.generate = generate
    name = f"{probe.model}@probe-{next(_numbers)}"
    _probes[name] = probe
    try:
        yield name
    finally:
        del _probes[name]


def _standing_in(asked: dict[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
    """A client that has the answer, for the part of `generate` that reads it."""
    content = [{"token": f"token_id:{token}", "token_id": token, "logprob": 0.0} for token in token_ids]
    ended = set(token_ids[-1:]) <= set(asked["renderer"].get_stop_token_ids())
    choice = {"token_ids": list(token_ids), "logprobs": {"content": content}}
    answer = {"choices": [choice | {"index": 0, "finish_reason": "stop" if ended else "length"}]}

    async def post(endpoint: str, **request: Any) -> Any:
        return SimpleNamespace(content=json.dumps(answer).encode())

    return {"client": SimpleNamespace(base_url=asked["client"].base_url, post=post), "max_prompt_len": math.inf}
