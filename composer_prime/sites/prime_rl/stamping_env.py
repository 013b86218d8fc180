"""A verifiers environment that plays any taskset with one agent and stamps teachers' numbers on what it sampled.

PRIME-RL's env server finds it under `env.id = "composer-prime"`; the embedded site uses it. It only adds to finished
traces what teachers/stamp.py says: rewards, advantages and the rollout itself stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import verifiers
import verifiers.v1 as vf
from pydantic import Field, model_validator
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.graph import MessageNode
from verifiers.v1.utils.loaders import environment_class

from composer_prime.config.distill import MAX_K
from composer_prime.config.teachers import HintsConfig, HintWriterConfig, TeacherConfig, check_distinct
from composer_prime.errors import BadInput, TeacherError, TeacherRefused
from composer_prime.hints.contexts import HintedContext, hint_text, hinted_context
from composer_prime.hints.error_sites import ErrorSite, error_sites, outcome_site, text_of
from composer_prime.hints.leaks import leaks, said_before
from composer_prime.hints.writer import HintWriter
from composer_prime.metrics import teacher_metric
from composer_prime.sites.prime_rl.policy_servers import PolicyServers
from composer_prime.sites.prime_rl.probing import PROBING, Probe, play, sampler
from composer_prime.teachers.candidates import Candidates
from composer_prime.teachers.fingerprint import load_tokenizer
from composer_prime.teachers.gate import PROBE_SHARE, Gate, Share
from composer_prime.teachers.pool import Score, Teacher, TeacherPool
from composer_prime.teachers.served import ServedModel, held_name
from composer_prime.teachers.stamp import Path, scoring_paths, stamp, stamp_candidates

__all__ = ["StampingEnv"]

HINTS_SITES = "hints/error_sites"
"""Sampled turns whose call failed, and for whose kind of error there is a hint."""
HINTS_TOKENS = "hints/tokens"
"""Sampled tokens of such turns that the hinted teacher gave a distribution for."""
HINTS_NO_PLACE = "hints/no_place"
"""Error sites left out because the renderer doesn't say which tokens are the body of the message before."""
HINTS_TOO_LONG = "hints/too_long"
"""Error sites left out because hint and conversation don't fit the teacher's context."""
HINTS_FAILED = "hints/failed"
"""Error sites left out because the teacher's server gave no scores, or not in time."""
HINTS_LEAKS = "hints/leaks"
"""Error sites left out because the hint holds the task's answer: the policy would learn it, not how to find it."""
HINTS_WRITTEN = "hints/written"
"""Error sites whose hint `[hints.writer]` wrote."""
HINTS_UNWRITTEN = "hints/unwritten"
"""Those for which it wrote none, or not in time: our template stands in."""
HINTS_METRICS = (
    HINTS_SITES, HINTS_TOKENS, HINTS_NO_PLACE, HINTS_TOO_LONG, HINTS_FAILED, HINTS_LEAKS, HINTS_WRITTEN,
    HINTS_UNWRITTEN,
)  # fmt: skip

HINTS = "hints"
"""The gate's name of hints' teacher."""

NONE_STEPS = 20
"""Steps without a turn to teach after which that is said."""

MOST_LEAD = 5.0
"""Nats of one token beyond which a teacher's lead counts no more."""

logger = logging.getLogger(__name__)


class StampingEnvConfig(vf.EnvConfig):
    """The environment's settings, beside those of every single-agent environment."""

    agent: vf.AgentConfig = vf.AgentConfig()
    """The policy's seat."""

    tokenizer: str = Field(min_length=1)
    """The policy's tokenizer, as a folder or a Hugging Face id: teachers are compared with it, hints encoded by it."""

    teachers: tuple[TeacherConfig, ...] = ()
    """The recipe's `[[replay.teachers]]`."""

    hints: HintsConfig | None = None
    """The recipe's `[hints]`; None: no hint distillation."""

    top_k: int = Field(default=0, ge=0, le=MAX_K)
    """The recipe's `trainer.distill.top_k`, which a recipe's launcher writes here; 0: no distributions are asked for,
    teachers give one number a token, and there are no hints."""

    stamp_ref_kl: bool = False
    """Set upstream's `ref_kl` loss weight on stamped tokens too, so that PRIME-RL runs its own term besides ours;
    with top_k = 0."""

    rollouts: int = Field(default=0, ge=0)
    """Rollouts that the run plays here, which a recipe's launcher writes here: what probes may cost is a part of them.
    0: not known."""

    batch: int = Field(default=0, ge=0)
    """Of them, those of one step."""

    embedded: bool = False
    """Set by the embedded site alone: it reads the traces in its own process, and its server holds the first policy."""

    @model_validator(mode="after")
    def _check_streams(self) -> StampingEnvConfig:
        check_distinct(self.teachers)
        if not self.teachers and self.hints is None:
            raise ValueError('env.id "composer-prime" needs env.teachers or env.hints: give one, or leave the id out')
        if self.hints is not None and not self.embedded:
            self.hints.check_stamped(self.top_k)
        if self.top_k and self.stamp_ref_kl:
            raise ValueError(
                "env.stamp_ref_kl is for teachers that give one number a token: drop it, or [trainer.distill] and "
                "env.top_k"
            )
        return self


class StampingEnv(vf.Env[StampingEnvConfig]):
    """See the module.

    gates   by name, the teachers' and "hints"
    stage   what a probe is played in, which an embedded site sets

    Raises BadInput for a taskset that brings an environment of its own, which this would replace, and under a
    verifiers whose nodes have no place for a teacher's number, or whose servers send nodes before they are stamped.
    """

    def __init__(self, config: StampingEnvConfig) -> None:
        if "reference_logprobs" not in MessageNode.model_fields:
            raise BadInput(
                f"verifiers {verifiers.__version__} has no reference_logprobs on its message nodes, where teachers' "
                "numbers go: use verifiers 0.3.1 or newer, with PRIME-RL 0.8.1.dev52 or newer"
            )
        if not config.embedded and find_spec("verifiers.v1.serve.delta") is not None:
            raise BadInput(
                f"verifiers {verifiers.__version__} sends a rollout's messages as they come, before teachers' numbers "
                "are on them: use one below 0.4 in PRIME-RL (559b447 has 0.3.1.dev62), or an embedded site"
            )
        super().__init__(config)
        own = environment_class(config.taskset.id)
        if own is not SingleAgentEnv:
            raise BadInput(
                f"taskset {config.taskset.id} brings its own environment ({own.__name__}), which env.id "
                '"composer-prime" would replace: use a taskset for one agent, or leave the id out'
            )
        names = [teacher.name for teacher in config.teachers] + [HINTS] * (config.hints is not None)
        share = PROBE_SHARE / max(len(names), 1)
        self.gates = {name: Gate(name, config.rollouts, share) for name in names}
        self.stage: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
        self._share, self._num_hinted = Share(), 0
        self._texts: list[str] = []  # the last two hints, of `hints.shuffle`
        self._tokenizer: Any = None
        self._pool = TeacherPool(())
        self._hint_pool = TeacherPool(())
        self._policies = PolicyServers()
        self._writer: HintWriter | None = None

    async def start(self) -> None:
        """Load the tokenizer and compare the teachers' with it. Raises BadInput, also TeacherRefused."""
        self._tokenizer = load_tokenizer(self.config.tokenizer)
        self._pool = TeacherPool(self.config.teachers, self.config.top_k, len(self._tokenizer))
        await self._pool.check(self._tokenizer)
        if self.config.hints is not None and self.config.hints.server is not None:
            self._hint_pool = TeacherPool(
                [self.config.hints.server], self.config.top_k, len(self._tokenizer), table="hints"
            )
            await self._hint_pool.check(self._tokenizer)
        if self.config.hints is not None and self.config.hints.writer is not None:
            self._writer = HintWriter(self.config.hints.writer)
            await self._try_writer(self.config.hints.writer)

    async def _try_writer(self, config: HintWriterConfig) -> None:
        assert self._writer is not None
        try:
            async with asyncio.timeout(config.timeout_s):
                await self._writer.write("Say hello.", "hello()", "error: unknown tool 'hello'")
        except (TeacherError, TimeoutError) as error:
            await self._writer.close()
            cause = str(error) or f"it gave no answer within hints.writer.timeout_s ({config.timeout_s:g} s)"
            raise TeacherRefused(f"hints.writer can't be used: {cause}") from error

    async def stop(self) -> None:
        """Close the connections to teachers and policy."""
        await self._pool.close()
        await self._hint_pool.close()
        if self._writer is not None:
            await self._writer.close()
        await self._policies.close()

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """One attempt of the one agent."""
        await agents.agent.run(task)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Stamp every trace that is trained on."""
        for trace in episode.traces:
            if not PROBING.get() and not trace.errors and (trace.agent is None or trace.agent.trainable):
                await self.stamp(task, trace)

    async def stamp(self, task: vf.Task, trace: vf.Trace) -> None:
        """Compare the teachers, put what is heard of them on the trace's nodes and record what came of it; in place."""
        paths = scoring_paths(trace)
        counts: Counter[str] = Counter()
        contexts, mistakes = await self._hinted_contexts(task, trace, counts)
        await asyncio.gather(
            self._probe_hints(task, trace, contexts),
            *(self._probe(task, trace, teacher, paths) for teacher in self._pool.teachers),
        )
        heard = [context for context in contexts if self.gates[HINTS].is_heard()]
        scores, hinted, held = await asyncio.gather(
            self._score_replay(paths),
            self._score_hints(trace, heard, counts),
            self._hold(trace, paths if heard else [], mistakes, counts),
        )
        hinted = {**held, **hinted} if hinted else {}
        for name, gate in self.gates.items():
            trace.record_metrics({teacher_metric(name, "weight"): gate.weight})
            if not math.isnan(gate.better):
                trace.record_metrics({teacher_metric(name, "better"): gate.better})
        top_k, teachers = self.config.top_k, self.config.teachers
        if top_k:
            num_streams = 2 if teachers and self.config.hints is not None else 1
            report = stamp_candidates(trace, paths, scores, hinted, top_k=top_k, num_streams=num_streams)
        else:
            report = stamp(paths, scores, ref_kl=self.config.stamp_ref_kl)
        trace.record_metrics(report.metrics([teacher.name for teacher in teachers]))
        if self.config.hints is not None:
            trace.record_metrics({name: float(counts[name]) for name in HINTS_METRICS})

    async def _hinted_contexts(
        self, task: vf.Task, trace: vf.Trace, counts: Counter[str]
    ) -> tuple[list[HintedContext], set[int]]:
        """The turns whose call failed, and the last one of a rollout that earned little, each in the context with its
        hint; and the `id(node)` of all such turns, also of those without a hint."""
        hints = self.config.hints
        if hints is None:
            return [], set()
        contexts = []
        sites = error_sites(trace.nodes)
        if self.gates[HINTS].is_poor(trace.reward):
            ask = getattr(task, "outcome_hint", lambda trace: None)
            outcome = outcome_site(trace, ask(trace))
            if outcome is not None and hint_text(outcome, hints.templates) is not None:
                sites += [outcome] if all(site.turn != outcome.turn for site in sites) else []
        written = await asyncio.gather(*(self._write(trace, site, hints, counts) for site in sites))
        for site, hint in zip(sites, written, strict=True):
            text = hint_text(site, hints.templates, hint)
            text = self._another(text) if hints.shuffle else text
            if text is not None and leaks(text, trace.task.data, said_before(trace.nodes, site.turn)):
                counts[HINTS_LEAKS] += 1
                logger.warning("a hint holds the answer of task=%s: left out", trace.task.data.idx)
            elif text is not None:
                hint_ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
                contexts.append(hinted_context(trace.nodes, site, hint_ids))
        counts[HINTS_SITES] = len(contexts)
        counts[HINTS_NO_PLACE] = contexts.count(None)
        return [each for each in contexts if each is not None], {id(trace.nodes[site.turn]) for site in sites}

    def _another(self, text: str | None) -> str | None:
        """The last hint that was another than this one; None until there was one."""
        if text is not None:
            self._texts = [text, *(each for each in self._texts if each != text)][:2]
        return self._texts[1] if text is not None and len(self._texts) > 1 else None

    async def _probe_hints(self, task: vf.Task, trace: vf.Trace, contexts: Sequence[HintedContext]) -> None:
        """Let hints' gate see the rollout, and the teacher take over at one of its turns."""
        if self.config.hints is None:
            return
        gate = self.gates[HINTS]
        gate.saw(task_key(trace), trace.reward, is_taught=bool(contexts))
        self._num_hinted += len(contexts)
        is_late = gate.num_rollouts >= NONE_STEPS * self.config.batch > 0
        if self._num_hinted == 0 and is_late and not self.config.hints.shuffle:
            self._num_hinted = -1  # said once
            logger.warning(
                "hints found no turn to teach in %d steps: no call fails as docs/teachers.md lists it; give hints for "
                "outcomes (hints.templates.reply, out_of_turns), or leave [hints] out",
                NONE_STEPS,
            )
        if contexts and gate.may_probe():
            context = contexts[gate.num_probes % len(contexts)]
            taken = {"said": context.said, "hint_ids": context.hint_ids, "tail": context.tail}
            await self._play(task, trace, self._hint_teacher(trace, self.config.hints), gate, **taken)

    async def _probe(self, task: vf.Task, trace: vf.Trace, teacher: Teacher, paths: Sequence[Path]) -> None:
        """Let a replay teacher's gate see a rollout, and the teacher play its task by itself."""
        gate = self.gates[teacher.config.name]
        margin = math.nan if gate.can_play else lead(paths, [await teacher.score(path.token_ids) for path in paths])
        gate.saw(task_key(trace), trace.reward, margin=margin)
        if gate.may_probe():
            await self._play(task, trace, teacher.served, gate)

    async def _play(self, task: vf.Task, trace: vf.Trace, teacher: ServedModel, gate: Gate, **taken: Any) -> None:
        assert trace.agent is not None and trace.agent.config.model is not None  # resolved before the agent ran
        reward = await play(self, task, trace, Probe(trace.agent.config.model, sampler(teacher, gate), **taken))
        trace.record_metrics({teacher_metric(gate.name, "probes"): 1.0})
        if reward is None:
            gate.failed()
        else:
            gate.played(reward)

    async def _score_replay(self, paths: Sequence[Path]) -> list[list[Score]]:
        """For each path, what the teachers that are heard say to it."""
        gates = [self.gates[teacher.name] for teacher in self.config.teachers]
        shares = [gate.weight for gate in gates]
        if not self._share.takes(max(shares, default=0.0)):
            return [[] for _ in paths]
        return list(await asyncio.gather(*(self._pool.score(path.token_ids, shares) for path in paths)))

    async def _score_hints(
        self, trace: vf.Trace, heard: Sequence[HintedContext], counts: Counter[str]
    ) -> dict[int, Candidates]:
        """By `id(node)`, what the hinted teacher says to the sampled tokens of the turns at which it is heard."""
        answers = await asyncio.gather(*(self._ask(trace, context.token_ids, counts) for context in heard))
        hinted = {
            id(context.node): candidates[context.places]
            for context, candidates in zip(heard, answers, strict=True)
            if candidates is not None
        }
        counts[HINTS_TOKENS] = sum(int(candidates.has_teacher.sum()) for candidates in hinted.values())
        return hinted

    async def _hold(
        self, trace: vf.Trace, paths: Sequence[Path], mistakes: Collection[int], counts: Counter[str]
    ) -> dict[int, Candidates]:
        """By `id(node)`, what hints' teacher says without a hint to the sampled tokens of the turns that are no
        mistakes: they are held to it, so that they don't drift while the others are taught."""
        hints = self.config.hints
        if hints is None or hints.teacher == "live":  # which is the policy itself
            return {}
        held = dict[int, Candidates]()
        answers = await asyncio.gather(*(self._ask(trace, path.token_ids, counts) for path in paths))
        for path, candidates in zip(paths, answers, strict=True):
            for node, start in path.nodes:
                if candidates is not None and id(node) not in mistakes:
                    places = [start + place for place, is_sampled in enumerate(node.mask) if is_sampled]
                    held[id(node)] = candidates[places]
        return held

    async def _write(self, trace: vf.Trace, site: ErrorSite, hints: HintsConfig, counts: Counter[str]) -> str | None:
        """A hint by `[hints.writer]`, where one is wanted and can come to something; None, counted, when none comes."""
        is_told = site.hint is not None or site.kind in hints.templates or site.answer == site.turn
        if self._writer is None or hints.writer is None or is_told or not self.gates[HINTS].wants_hints():
            return None
        turn, answer = trace.nodes[site.turn].message, trace.nodes[site.answer].message
        calls = [f"{call.name}({call.arguments})" for call in getattr(turn, "tool_calls", None) or []]
        told = "\n".join(calls) or text_of(turn.content)
        try:
            async with asyncio.timeout(hints.writer.timeout_s):
                hint = await self._writer.write(trace.task.data.prompt_text, told, text_of(answer.content))
        except (TeacherError, TimeoutError) as error:
            logger.warning("hint not written, a template stands in: %s", error or "late")
            hint = ""
        counts[HINTS_WRITTEN if hint else HINTS_UNWRITTEN] += 1
        return hint or None

    async def _ask(self, trace: vf.Trace, token_ids: Sequence[int], counts: Counter[str]) -> Candidates | None:
        """What hints' teacher says to a token sequence; None, counted, without."""
        hints = self.config.hints
        assert hints is not None
        teacher = self._hint_teacher(trace, hints)
        try:
            async with asyncio.timeout(hints.timeout_s):
                if teacher.route is None:
                    await teacher.find()
                length, limit = len(token_ids), teacher.max_model_len
                if limit is not None and length >= limit:
                    counts[HINTS_TOO_LONG] += 1
                    logger.warning("hinted=%d tokens must be below the teacher's context=%d: left out", length, limit)
                    return None
                scores = await teacher.scores(token_ids, self.config.top_k, len(self._tokenizer))
        except (TeacherError, TimeoutError) as error:
            counts[HINTS_FAILED] += 1
            logger.warning("hinted=%d tokens not scored: %s", len(token_ids), error or "late")
            return None
        return scores.candidates

    def _hint_teacher(self, trace: vf.Trace, hints: HintsConfig) -> ServedModel:
        """The server at hints.base_url; without one that which the trace was sampled from, under the name of the
        teacher where it holds that as well."""
        if self._hint_pool.teachers:
            return self._hint_pool.teachers[0].served
        assert trace.agent is not None  # verifiers sets it on every trace that an agent played
        client, model = trace.agent.config.client, trace.agent.config.model
        assert client is not None and model is not None  # resolved before the agent ran
        return self._policies.at(client, held_name(model, hints.teacher) if hints.is_held else model)


def lead(paths: Sequence[Path], scores: Sequence[Score]) -> float:
    """Nats a token that a teacher gives more than the policy to what the policy said; NaN where it said nothing."""
    found = []
    for path, score in zip(paths, scores, strict=True):
        if score.scores is None:
            continue
        for node, start in path.nodes:
            places = [place for place, is_sampled in enumerate(node.mask) if is_sampled]
            said = zip(places, node.logprobs, strict=True)
            found += [score.scores.logprobs[start + place] - own for place, own in said]
    return math.nan if not found else sum(min(max(each, -MOST_LEAD), MOST_LEAD) for each in found) / len(found)


def task_key(trace: vf.Trace) -> Hashable:
    """What tells a trace's task from others."""
    data = trace.task.data
    return data.prompt_text if data.idx is None else data.idx
