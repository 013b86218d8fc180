"""A verifiers environment whose episodes are stored lessons: PRIME-RL learns them by its own losses.

It comes with its taskset, `env.taskset.id = "composer-prime-pairs"`. Nothing is played: the policy of the moment scores
the action that teachers agree on, which becomes a trace with weights of PRIME-RL's own cross entropy. Where the author
did something else and the policy can form the agreed action, the author's becomes a second trace. The two rewards are
opposite, so that the group's mean is 0 and GRPO's advantages are the rewards: at the policy that scored them PRIME-RL's
loss has DPO's own gradient, or SimPO's.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import verifiers
import verifiers.v1 as vf
from pydantic import Field, model_validator
from verifiers.v1.configs.env import TimeoutConfig
from verifiers.v1.graph import MessageNode

from composer_prime import metrics
from composer_prime.config.distill import Schedule
from composer_prime.config.teachers import PreferenceConfig, TeacherConfig
from composer_prime.errors import BadInput, TeacherError
from composer_prime.losses.preferences import Formed, Scored, lead, margin, pull
from composer_prime.sites.prime_rl.policy_servers import PolicyServers
from composer_prime.teachers.pool import TeacherPool
from composer_prime.teachers.served import ServedModel
from composer_prime.traces.ingest.store import TraceStore
from composer_prime.traces.pairs.encoding import Action, Encoder, scores
from composer_prime.traces.pairs.file import read_decisions
from composer_prime.traces.pairs.lessons import read_lessons

__all__ = ["PairsEnv", "PairsTaskset"]

REWARD = "pairs/pull"
"""The reward's name on the traces: what pulls the action up, or down."""


class PairData(vf.TaskData):
    """A lesson on its way to the environment's server."""

    lesson: str
    """{"messages", "tools", "chosen", "rejected", "weight"} as JSON. Escaped to ASCII: half a surrogate, which a trace
    may hold, can't travel as it is."""


class PairTask(vf.Task[PairData]):
    """A lesson to be scored."""


class PairsTasksetConfig(vf.TasksetConfig):
    """`env.taskset`"""

    store: Path
    """What `composer-prime replay ingest` filled."""

    file: Path
    """What `composer-prime replay pairs` wrote of it."""

    @model_validator(mode="after")
    def _check_file(self) -> PairsTasksetConfig:
        try:
            next(read_decisions(self.file))
            TraceStore(self.store)
        except BadInput as error:
            raise ValueError(f"env.taskset: {error}") from error
        return self


class PairsTaskset(vf.Taskset[PairTask, PairsTasksetConfig]):
    """The lessons of a file, mixed once: neighbours in the store are of one session."""

    def load(self) -> Iterator[PairTask]:
        """Raises BadInput when the file can't be read, is of another store, or has no agreement."""
        lessons = list(read_lessons(TraceStore(self.config.store), self.config.file))
        random.Random(0).shuffle(lessons)
        for idx, lesson in enumerate(lessons):
            told = {
                "messages": lesson.state.messages,
                "tools": lesson.state.tools,
                "chosen": lesson.chosen,
                "rejected": lesson.rejected,
                "weight": lesson.weight,
            }
            yield PairTask(PairData.model_validate({"idx": idx, "lesson": json.dumps(told)}), self.config.task)


class ReferenceConfig(TeacherConfig):
    """`env.reference`: a server of the model that the run begins with, which DPO compares the policy with."""

    name: str = "reference"


class PairsEnvConfig(vf.EnvConfig):
    """The environment's settings."""

    agent: vf.AgentConfig = vf.AgentConfig.model_validate(
        {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    )
    """The policy's seat, which every environment has; nobody plays."""

    timeout: TimeoutConfig = TimeoutConfig(episode=120.0)
    """Seconds that a pair's scores may take."""

    seq_len: int = Field(ge=2)
    """Tokens that a trainer's sample may have: PRIME-RL's own seq_len, which a recipe's launcher writes here."""

    pairs: PreferenceConfig = PreferenceConfig()
    """What is learned of a lesson: the settings of a recipe's `[replay.pairs]`."""

    too_long: Literal["cut", "leave_out"] = "cut"
    """Of a lesson longer than seq_len the oldest tool results are cut until it fits, or its episode fails."""

    reference: ReferenceConfig | None = None
    """DPO's reference; SimPO has none."""

    @model_validator(mode="after")
    def _check_reference(self) -> PairsEnvConfig:
        if self.pairs.has_reference and self.reference is None:
            raise ValueError(
                'env.reference.base_url must be given with env.pairs.loss = "dpo": serve the model that the run begins '
                'with on a server of its own, and write its address there, or set env.pairs.loss = "simpo", or tau = 0'
            )
        if not self.pairs.has_reference and self.reference is not None:
            raise ValueError('env.reference is for env.pairs.loss = "dpo" with a tau above 0: drop the table')
        for name in ("tau", "sft_tau"):
            if isinstance(getattr(self.pairs, name), Schedule):
                raise ValueError(
                    f"env.pairs.{name} must be one number, since PRIME-RL tells an environment no step: set one"
                )
        return self


class PairsEnv(vf.Env[PairsEnvConfig]):
    """See the module. Raises BadInput under a verifiers whose nodes have no place for loss weights."""

    def __init__(self, config: PairsEnvConfig) -> None:
        if "loss_weights" not in MessageNode.model_fields:
            raise BadInput(
                f"verifiers {verifiers.__version__} has no loss_weights on its message nodes: use verifiers 0.3.1 or "
                "newer, with PRIME-RL 0.8.1.dev52 or newer"
            )
        super().__init__(config)
        self._reference = TeacherPool([config.reference] if config.reference else (), table="env.reference")
        self._policies = PolicyServers()
        self._tokenizer: Any = None
        self._encoder: Encoder | None = None
        self._referenced: dict[str, list[float]] = {}
        self._formed = Formed(config.pairs.min_logprob)
        self._starting = asyncio.Lock()
        self._encoding = threading.Lock()  # a tokenizer has a state, and a cancelled episode's thread goes on

    async def stop(self) -> None:
        """Close the connections."""
        await self._reference.close()
        await self._policies.close()

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Never called: `run_episode` plays nothing."""
        raise NotImplementedError

    async def run_episode(
        self,
        task: vf.Task,
        ctx: vf.ModelContext,
        *,
        on_trace: Callable[[vf.Trace], None] | None = None,
        on_discard: Callable[[vf.Trace], None] | None = None,
    ) -> vf.Episode:
        """The agreed action's trace, and the author's where there is a preference, under the policy of the moment.

        Raises BadInput for a lesson that doesn't fit `seq_len`, and for another sampling temperature than 1, and
        TeacherError when a server gives no score.
        """
        if ctx.sampling.temperature not in (None, 1):
            raise BadInput(
                f"sampling.temperature ({ctx.sampling.temperature:g}) of this source must be 1, at which actions are "
                "scored: set it so"
            )
        lesson = json.loads(task.data.lesson)
        server = self._policies.at(ctx.client, ctx.model)
        try:
            async with asyncio.timeout(self.config.timeout.episode):
                actions = await self._encode(lesson, await self._started(ctx))
                logprobs = await asyncio.gather(*(scores(server, action) for action in actions))
                if not self._formed.saw(task.hash, fmean(logprobs[0])):
                    actions, logprobs = actions[:1], logprobs[:1]
                references = await self._reference_of(task.hash, actions)
        except TimeoutError:
            raise TeacherError(
                f"no scores within env.timeout.episode ({self.config.timeout.episode:g} s) of {server.base_url}"
                f"{' or of env.reference' if self.config.reference else ''}: look whether it answers, or raise it"
            ) from None
        scored = [
            Scored(sum(own), action.num_tokens, reference)
            for own, action, reference in zip(logprobs, actions, references, strict=True)
        ]
        reward, found = judge(self.config.pairs, lesson["weight"], *scored)
        record = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = vf.Episode(env=vf.EnvInfo(id=self.config.env_id), task=record, ok=True)
        messages = (lesson["chosen"], lesson["rejected"])
        for sign, message, action, own in zip((1, -1), messages, actions, logprobs, strict=False):
            imitation = self.config.pairs.sft_tau * lesson["weight"] if sign > 0 else 0.0
            trace = vf.Trace(task=record, agent=self._seat(ctx, is_taught=bool(reward or imitation)), ok=True)
            self._add(trace, message, action, own, imitation)
            trace.record_reward(REWARD, sign * reward)
            trace.record_metrics(found)
            trace.stop("stored")
            episode.traces.append(trace)
            if on_trace is not None:
                on_trace(trace)
        return episode

    def _seat(self, ctx: vf.ModelContext, *, is_taught: bool) -> vf.AgentInfo:
        """Who acted. A trace that teaches nothing isn't trained on, and so takes no place in a batch."""
        config = self.config.agent.model_copy(
            update={"model": ctx.model, "client": ctx.client, "sampling": ctx.sampling}
        )
        return vf.AgentInfo(config=config, trainable=is_taught)

    def _add(
        self, trace: vf.Trace, message: Mapping[str, Any], action: Action, logprobs: list[float], imitation: float
    ) -> None:
        """Put an action on a trace as if the policy had sampled it in one call; the prompt's tokens are on its node.

        imitation  weight of its tokens' cross entropy
        """
        length = action.num_tokens
        weights = {"rl": 1 / length if self.config.pairs.loss == "simpo" else 0.0, "ce": imitation}
        streams = {
            name: [weight if is_ours else 0.0 for is_ours in action.mask] for name, weight in weights.items() if weight
        }
        trace.nodes.append(
            MessageNode(
                message=vf.AssistantMessage(content=json.dumps(message)),
                sampled=True,
                token_ids=action.token_ids,
                mask=action.mask,
                logprobs=logprobs,
                loss_weights=streams or None,
            )
        )
        usage = vf.Usage(prompt_tokens=len(action.token_ids) - length, completion_tokens=length)
        trace.calls.append(vf.ModelCall(node=0, finish_reason="stop", usage=usage))

    async def _started(self, ctx: vf.ModelContext) -> Encoder:
        """The renderer that PRIME-RL names for this source's rollouts. Raises TeacherRefused for a reference that
        reads token ids otherwise."""
        from renderers import create_renderer
        from renderers.base import load_tokenizer

        client = ctx.client
        if not isinstance(client, vf.TrainClientConfig):
            raise BadInput(
                f"pairs are for training sources, and this one's client is of type {client.type}: name the file under "
                "[[orchestrator.train.source]]"
            )
        async with self._starting:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(load_tokenizer, client.renderer_model_name or ctx.model)
            if self._encoder is None:
                await self._reference.check(self._tokenizer)
                extra = ctx.sampling.model_extra or {}
                template = ((extra.get("extra_body") or {}) | extra).get("chat_template_kwargs")  # 0.3 | newer
                renderer = create_renderer(self._tokenizer, client.renderer, chat_template_kwargs=template)
                self._encoder = Encoder(renderer, self.config.seq_len)
        return self._encoder

    async def _encode(self, lesson: Mapping[str, Any], encoder: Encoder) -> list[Action]:
        """The agreed action, and the author's where that is learned from, as the rollouts' renderer writes them."""
        has_preference = self.config.pairs.tau and lesson["rejected"] is not None
        said = [lesson["chosen"], lesson["rejected"]] if has_preference else [lesson["chosen"]]

        def all_of_them() -> list[Action] | None:
            with self._encoding:
                found, _ = encoder.fit_all(
                    lesson["messages"], lesson["tools"], said, may_cut=self.config.too_long == "cut"
                )
                return found

        actions = await asyncio.to_thread(all_of_them)
        if actions is None:
            raise BadInput(
                f"a lesson of {len(lesson['messages'])} messages doesn't fit env.seq_len ({self.config.seq_len} "
                "tokens): raise seq_len"
            )
        return actions

    async def _reference_of(self, key: str, actions: list[Action]) -> list[float]:
        """The actions' logprobs in nats under the reference, which doesn't move; zeros where it isn't needed."""
        servers: list[ServedModel] = [teacher.served for teacher in self._reference.teachers]
        if not servers or len(actions) < 2:
            return [0.0] * len(actions)
        if key not in self._referenced:
            told = await asyncio.gather(*(scores(servers[0], action) for action in actions))
            self._referenced[key] = [sum(own) for own in told]
        return self._referenced[key]


def judge(
    config: PreferenceConfig, weight: float, chosen: Scored, rejected: Scored | None = None
) -> tuple[float, dict[str, float]]:
    """The reward of an agreed action, whose negative is the author's, and the lesson's metrics.

    weight    the lesson's own
    rejected  None: there is no preference
    """
    assert not isinstance(config.tau, Schedule)  # the environment's configuration has none
    logprob = {metrics.PAIRS_LOGPROB: chosen.logprob / chosen.num_tokens}
    if rejected is None:
        return 0.0, logprob
    settings = {"beta": config.scale, "gamma": config.gamma}
    rests = lead(chosen, rejected) >= config.max_lead
    reward = 0.0 if rests else config.tau * weight * pull(config.loss, chosen, rejected, **settings)
    at = margin(config.loss, chosen, rejected, **settings)
    return reward, logprob | {
        metrics.PAIRS_MARGIN: at,
        metrics.PAIRS_ACCURACY: float(at > 0),
        metrics.PAIRS_LEARNED: float(rests),
    }
