"""A verifiers environment whose episodes are stored preference pairs: PRIME-RL learns them by its own GRPO.

It comes with its taskset, `env.taskset.id = "composer-prime-pairs"`. Nothing is played: the policy of the moment scores
a pair's two actions, and each becomes a trace. Their rewards are opposite, so that the group's mean is 0 and GRPO's
advantages are the rewards: at the policy that scored them PRIME-RL's loss has DPO's own gradient, or SimPO's.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import verifiers
import verifiers.v1 as vf
from pydantic import AfterValidator, Field, model_validator
from verifiers.v1.configs.env import TimeoutConfig
from verifiers.v1.graph import MessageNode

from composer_prime import metrics
from composer_prime.config.distill import Schedule
from composer_prime.config.stored import PreferenceConfig
from composer_prime.config.table import Table
from composer_prime.config.teachers import TeacherConfig, check_url
from composer_prime.errors import BadInput, TeacherError
from composer_prime.sites.prime_rl.policy_servers import PolicyServers
from composer_prime.teachers.pool import TeacherPool
from composer_prime.teachers.served import ServedModel
from composer_prime.traces.pairs.advantages import Scored, lead, margin, pull
from composer_prime.traces.pairs.encoding import Action, Encoder, scores
from composer_prime.traces.pairs.file import Pair, read_pairs

__all__ = ["PairsEnv", "PairsTaskset"]

REWARD = "pairs/pull"
"""The reward's name on the traces: what pulls the action up, or down."""


class PairData(vf.TaskData):
    """A pair on its way to the environment's server."""

    pair: str
    """A `Pair` as JSON. Escaped to ASCII: half a surrogate, which a trace may hold, can't travel as it is."""


class PairTask(vf.Task[PairData]):
    """A pair to be scored."""


class PairsTasksetConfig(vf.TasksetConfig):
    """`env.taskset`"""

    file: Path
    """What `composer-prime replay pairs` wrote."""

    @model_validator(mode="after")
    def _check_file(self) -> PairsTasksetConfig:
        try:
            next(read_pairs(self.file))
        except BadInput as error:
            raise ValueError(f"env.taskset.file: {error}") from error
        return self


class PairsTaskset(vf.Taskset[PairTask, PairsTasksetConfig]):
    """The pairs of a file, mixed once: neighbours in the file are of one session."""

    def load(self) -> Iterator[PairTask]:
        """Raises BadInput when the file can't be read or has no pairs."""
        pairs = [record for record in read_pairs(self.config.file) if isinstance(record, Pair)]
        if not pairs:
            raise BadInput(f"{self.config.file} has scores and no pairs: give another file, or drop its source")
        random.Random(0).shuffle(pairs)
        for idx, pair in enumerate(pairs):
            data = PairData.model_validate({"idx": idx, "pair": json.dumps(pair.model_dump())})
            yield PairTask(data, self.config.task)


class ReferenceConfig(Table):
    """`env.reference`: a server of the model that the run begins with, which DPO compares the policy with."""

    base_url: Annotated[str, AfterValidator(check_url)]
    """Root of a server that returns prompt logprobs; a trailing /v1 is dropped."""

    model: str | None = Field(default=None, min_length=1)
    """The name it is served under; None: the first that the server lists."""

    api_key_var: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the server's key; None: it wants none."""


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
    """What is learned of a pair: the settings of a recipe's `[replay.pairs]`."""

    reference: ReferenceConfig | None = None
    """DPO's reference; SimPO has none."""

    @model_validator(mode="after")
    def _check_reference(self) -> PairsEnvConfig:
        if self.pairs.loss == "dpo" and self.reference is None:
            raise ValueError(
                'env.reference.base_url must be given with env.pairs.loss = "dpo": serve the model that the run begins '
                'with on a server of its own, and write its address there, or set env.pairs.loss = "simpo"'
            )
        if self.pairs.loss == "simpo" and self.reference is not None:
            raise ValueError('env.reference is for env.pairs.loss = "dpo", and it is "simpo": drop the table')
        if isinstance(self.pairs.tau, Schedule):
            raise ValueError("env.pairs.tau must be one number, since PRIME-RL tells an environment no step: set one")
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
        table = config.reference
        teachers = () if table is None else (TeacherConfig(name="reference", **table.model_dump()),)
        self._reference = TeacherPool(teachers, table="env.reference")
        self._policies = PolicyServers()
        self._tokenizer: Any = None
        self._encoder: Encoder | None = None
        self._referenced: dict[str, list[float]] = {}
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
        """The chosen action's trace and the rejected one's, under the policy of the moment.

        Raises BadInput for a pair that doesn't fit `seq_len`, and for another sampling temperature than 1, and
        TeacherError when a server gives no score.
        """
        if ctx.sampling.temperature not in (None, 1):
            raise BadInput(
                f"sampling.temperature ({ctx.sampling.temperature:g}) of this source must be 1, at which a pair's "
                "actions are scored: set it so"
            )
        pair = Pair.model_validate(json.loads(task.data.pair))
        server = self._policies.at(ctx.client, ctx.model)
        try:
            async with asyncio.timeout(self.config.timeout.episode):
                actions = await self._encode(pair, await self._started(ctx))
                logprobs = await asyncio.gather(*(scores(server, action) for action in actions))
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
        reward, found = judge(self.config.pairs, pair.weight, *scored)
        record = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = vf.Episode(env=vf.EnvInfo(id=self.config.env_id), task=record, ok=True)
        for sign, message, action, own in zip((1, -1), (pair.chosen, pair.rejected), actions, logprobs, strict=True):
            imitation = self.config.pairs.sft_tau * pair.weight if sign > 0 else 0.0
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

    async def _encode(self, pair: Pair, encoder: Encoder) -> list[Action]:
        """The chosen action and the rejected one, as the rollouts' renderer writes them."""

        def both() -> list[Action | None]:
            with self._encoding:
                return [encoder.encode(pair.messages, pair.tools, action) for action in (pair.chosen, pair.rejected)]

        found = await asyncio.to_thread(both)
        actions = [action for action in found if action is not None]
        if len(actions) < len(found):
            raise BadInput(
                f"the pair at state {pair.state} doesn't fit env.seq_len ({self.config.seq_len} tokens): raise "
                "seq_len, or take it out of env.taskset.file"
            )
        return actions

    async def _reference_of(self, key: str, actions: list[Action]) -> list[float]:
        """The actions' logprobs in nats under the reference, which doesn't move; zeros without one."""
        servers: list[ServedModel] = [teacher.served for teacher in self._reference.teachers]
        if not servers:
            return [0.0, 0.0]
        if key not in self._referenced:
            told = await asyncio.gather(*(scores(servers[0], action) for action in actions))
            self._referenced[key] = [sum(own) for own in told]
        return self._referenced[key]


def judge(config: PreferenceConfig, weight: float, chosen: Scored, rejected: Scored) -> tuple[float, dict[str, float]]:
    """The reward of a pair's chosen action, whose negative is the rejected one's, and the pair's metrics.

    weight  the pair's own
    """
    assert not isinstance(config.tau, Schedule)  # the environment's configuration has none
    settings = {"beta": config.scale, "gamma": config.gamma}
    rests = lead(chosen, rejected) >= config.max_lead
    reward = 0.0 if rests else config.tau * weight * pull(config.loss, chosen, rejected, **settings)
    at = margin(config.loss, chosen, rejected, **settings)
    return reward, {
        metrics.PAIRS_MARGIN: at,
        metrics.PAIRS_ACCURACY: float(at > 0),
        metrics.PAIRS_LEARNED: float(rests),
    }
