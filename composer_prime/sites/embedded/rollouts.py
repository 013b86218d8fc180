"""Plays groups of rollouts: verifiers environments inside this process, against the site's inference server.

A failed rollout is data: it is told apart, with its reason, and never stops the others. What comes out are plain
records of token streams and rewards, which know nothing of verifiers.
"""

import asyncio
import contextlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import verifiers.v1 as vf

from composer_prime.bearer import SITE_TOKEN
from composer_prime.config.settings import SiteSettings
from composer_prime.sites.embedded import chat
from composer_prime.sites.embedded.conversations import Message, read_messages
from composer_prime.sites.embedded.environments import Source
from composer_prime.sites.embedded.renderer_choice import renderer_settings
from composer_prime.sites.embedded.tools.stage import on_stage
from composer_prime.sites.prime_rl.stamping_env import StampingEnv
from composer_prime.waiting import Waits

ROLLOUT_TIMEOUT_S = 600.0
"""A rollout that takes longer counts as failed: its server or its environment hangs."""

_STREAMS = ("replay/", "hints/", "tools/", "teacher/")
_CAUSED = re.compile(r"^(?:The above exception was|During handling of).*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Branch:
    """One token sequence of a rollout: the conversation from its start to one of its ends.

    Streams are aligned with `token_ids`: `mask` is True where the policy sampled, `logprobs` (nats, after
    temperature) and `ref_logprobs` (what the environment stamped, None without) are 0.0 where it didn't. `candidates`
    are teachers' distributions as teachers/carrier.py packs them, None where no token has one.
    """

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    ref_logprobs: list[float] | None = None
    candidates: np.ndarray | None = None

    @property
    def is_taught(self) -> bool:
        """Whether a teacher has a word on some token."""
        return self.candidates is not None or any(self.ref_logprobs or ())


@dataclass(frozen=True)
class Rollout:
    """One attempt at a task that went through: its reward, and the branches the policy is to learn from.

    streams   what came of teachers, hints and tools, by the names that begin with one of _STREAMS
    turns     messages that the policy sampled
    messages  the conversation as people read it
    """

    reward: float
    branches: tuple[Branch, ...]
    streams: Mapping[str, float] = field(default_factory=dict)
    turns: int = 1
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Group:
    """The rollouts of one task.

    policy_version  the policy the inference server held when the group began. An update may land while it plays, so
                    this is the oldest version its tokens can come from. (verifiers' client drops the version that
                    the server puts on every answer.)
    failures        why rollouts failed, one reason each.
    """

    source: str
    policy_version: int
    rollouts: tuple[Rollout, ...]
    failures: tuple[str, ...]


class RolloutPlayer:
    """Plays rollouts while it is entered (`async with`): the environments' servers run that long.

    sources   what can be played.
    base_url  root of the inference server, without /v1.
    model     the name under which it serves the policy.

    Raises ConfigError when the recipe's renderer isn't one. Entering raises EnvError for tools that can't be used.
    """

    def __init__(self, sources: Sequence[Source], settings: SiteSettings, *, base_url: str, model: str) -> None:
        self.sources = list(sources)
        sampling = settings.recipe.orchestrator.train.sampling
        client = vf.TrainClientConfig.model_validate(
            {
                "base_url": f"{base_url}/v1",
                "api_key_var": SITE_TOKEN,
                "renderer": renderer_settings(
                    settings.recipe.orchestrator.renderer, settings.recipe.model.name, settings.model_dir
                ),
                "renderer_model_name": str(settings.model_dir),
            }
        )
        limits = vf.SamplingConfig(temperature=sampling.temperature, max_tokens=sampling.max_completion_tokens)
        self._context = vf.ModelContext(model=model, client=client, sampling=limits)
        self._slots = asyncio.Semaphore(settings.recipe.inference.max_batch_size)
        self._stack = contextlib.AsyncExitStack()
        self.num_playing, self.waits = 0, Waits()

    async def __aenter__(self) -> "RolloutPlayer":
        self._stack.push_async_callback(chat.close_connections)
        try:
            for source in self.sources:
                if source.tools is not None:
                    self._stack.push_async_callback(source.tools.close)
                    await source.tools.open(source.env.taskset.config.id, source.tasks[0])
                    if isinstance(source.env, StampingEnv):
                        source.env.stage = partial(on_stage, source.tools)
                await self._stack.enter_async_context(source.env.serving())
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def play_group(self, source: int, task: int, size: int, policy_version: int) -> Group:
        """`size` rollouts of one task at once; at most inference.max_batch_size are in flight over all groups."""
        chosen = self.sources[source]
        outcomes = await asyncio.gather(*(self._play(chosen, chosen.tasks[task], self._context) for _ in range(size)))
        return Group(
            source=chosen.name,
            policy_version=policy_version,
            rollouts=tuple(outcome for outcome in outcomes if isinstance(outcome, Rollout)),
            failures=tuple(outcome for outcome in outcomes if isinstance(outcome, str)),
        )

    async def _play(self, source: Source, task: vf.Task, context: vf.ModelContext) -> Rollout | str:
        async with self._slots:
            self.num_playing += 1
            try:
                stage = contextlib.nullcontext() if source.tools is None else on_stage(source.tools)
                async with asyncio.timeout(ROLLOUT_TIMEOUT_S), stage:
                    return read_episode(await source.env.run_slot(source.env.slots(task)[0], context))
            except TimeoutError:
                return f"TimeoutError: not done after {ROLLOUT_TIMEOUT_S:g} s"
            finally:
                self.num_playing -= 1
                self.waits.say("rollouts", None)


def read_episode(episode: vf.Episode) -> Rollout | str:
    """What an episode is worth to the trainer, or why it failed.

    The reward is the sum over the trainable agents. Their branches are kept, save those that verifiers doesn't train on
    or that hold no sampled token.
    """
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not errors:
            return "the episode ended early and gave no reason"
        return f"{errors[-1].type}: {errors[-1].message}{_place(errors[-1])}"
    traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    reward = float(sum(trace.reward for trace in traces))
    if not math.isfinite(reward):
        return f"the reward ({reward}) isn't a finite number"
    branches = (_read_branch(branch) for trace in traces for branch in trace.branches if _is_trainable(branch))
    streams = Counter[str]()
    for trace in traces:
        streams.update({name: value for name, value in trace.metrics.items() if name.startswith(_STREAMS)})
    return Rollout(
        reward,
        tuple(branch for branch in branches if any(branch.mask)),
        streams,
        turns=sum(trace.num_turns for trace in traces),
        messages=read_messages(traces[0]) if traces else (),
    )


def _place(error: vf.Error) -> str:
    """Where a function of the environment raised, its name, file and line: the first frame below verifiers' own."""
    raised = _CAUSED.split(error.traceback or "")[-2:-1] if error.type == "TaskError" else []
    frames = _FRAME.findall(raised[0]) if raised else []
    outer = max((place for place, (file, *_) in enumerate(frames) if "/verifiers/v1/" in file), default=-1)
    return "".join(f" ({name}, {file}:{line})" for file, line, name in frames[outer + 1 : outer + 2])


def _is_trainable(branch: vf.Branch) -> bool:
    return getattr(branch, "trainable", True)  # from verifiers 0.4 on


def _read_branch(branch: vf.Branch) -> Branch:
    candidates = branch.routed_experts
    return Branch(
        token_ids=_listed(branch.token_ids),
        mask=_listed(branch.sampled_mask),
        logprobs=_listed(branch.logprobs),
        ref_logprobs=None if branch.reference_logprobs is None else _listed(branch.reference_logprobs),
        candidates=candidates if candidates is not None and candidates.any() else None,
    )


def _listed(values: Any) -> list[Any]:
    """Numbers as Python has them: the next verifiers keeps streams in numpy's."""
    return np.asarray(values).tolist()
