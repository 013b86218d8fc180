"""Demonstrations: a scripted player's conversations through the taskset's real tools, in this process.

For each call that fails, and for the end of one that earned little, there is one more, in which hint distillation's
own hint stands before that turn, and what came of heeding it is played on from there: a policy that learns to heed
hints must know the way behind them, too.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import state_cls

from composer_prime.errors import EnvError
from composer_prime.hints.contexts import hint_text
from composer_prime.hints.error_sites import ErrorSite, error_sites, outcome_site
from composer_prime.hints.leaks import leaks, said_before
from composer_prime.sites.embedded.chat import ChatHarness, ChatHarnessConfig
from composer_prime.sites.embedded.environments import Source
from composer_prime.sites.embedded.tools.listing import ToolFailure
from composer_prime.sites.embedded.tools.stage import on_stage
from tiny_policy.player import Message, Player

MAX_BRANCHES = 8
"""Conversations that are played of one task at once: the first, and those that go on behind a hint."""


@dataclass(frozen=True)
class Demonstration:
    """One conversation, which ends with an assistant's message.

    taught  indices of the messages that the policy is to say; the others are shown
    hinted  whether a hint stands at the end of the message before the last one, which alone is taught then
    """

    task: vf.Task
    tools: list[dict[str, Any]]
    messages: list[Message]
    taught: tuple[int, ...]
    hinted: bool = False


class Stagehand:
    """Plays the tasks of a source by its player.

    max_turns   of the player in one conversation, as `env.agent.max_turns`
    with_hints  whether turns that hints are for are shown with their hint, too
    """

    def __init__(self, source: Source, player: Player, max_turns: int, *, with_hints: bool) -> None:
        self._source = source
        self._player = player
        self._max_turns = max_turns
        self._with_hints = with_hints
        self._harness = ChatHarness(ChatHarnessConfig(id="chat"))  # pyright: ignore[reportCallIssue]
        self._most = 0.0  # that a conversation earned

    async def play(self, task: vf.Task, rng: random.Random) -> list[list[Demonstration]]:
        """Families of conversations about a task: one and its turns with hints, and those of what heeding them leads
        to. Raises EnvError."""
        families, waiting, known = list[list[Demonstration]](), list[list[Message]]([[]]), set[str]()
        while waiting and len(known) <= MAX_BRANCHES:
            given = waiting.pop(0)
            messages, tools, trace = await self._converse(task, rng, given)
            turns = _turns(messages)
            family = []
            if len(turns) > len(given):
                family.append(Demonstration(task, tools, messages[: turns[-1] + 1], tuple(turns[len(given) :])))
            for site in await self._sites(task, trace) if self._with_hints else ():
                if site.turn < turns[min(len(given), len(turns) - 1)]:
                    continue
                hinted = self._hinted(task, tools, messages, site, rng)
                if hinted is None:
                    continue
                family.append(hinted)
                way = [messages[turn] for turn in turns if turn < site.turn] + hinted.messages[-1:]
                if hinted.messages[-1].get("tool_calls") and (key := str(way)) not in known:
                    known.add(key)
                    waiting.append(way)
            families += [family] if family else []
        return families

    async def heed(self, task: vf.Task, rng: random.Random) -> tuple[Demonstration, float]:
        """One conversation about a task in which each mistake was taken back for what the player says under the hint
        for it, and what it earned. No hint stands in it. Raises EnvError."""
        given = list[Message]()
        while True:
            messages, tools, trace = await self._converse(task, rng, given)
            turns = _turns(messages)
            for site in await self._sites(task, trace):
                place = turns.index(site.turn)
                hinted = None if place < len(given) else self._hinted(task, tools, messages, site, rng)
                if hinted is not None:
                    given = [*(messages[turn] for turn in turns[:place]), hinted.messages[-1]]
                    break
            else:
                await self._score(task, trace)
                return Demonstration(task, tools, messages[: turns[-1] + 1], tuple(turns)), trace.reward

    async def _converse(
        self, task: vf.Task, rng: random.Random, given: Sequence[Message]
    ) -> tuple[list[Message], list[dict[str, Any]], vf.Trace]:
        """The messages of one rollout that begins with the given turns, the answers to the last calls among them, the
        tools that it had, and its trace, without scores."""
        taskset_id = self._player.taskset_id
        seat = vf.TraceTask(type=type(task).__name__, data=task.data)
        trace = vf.Trace.model_construct(task=seat, state=state_cls(type(task))())
        messages = self._opening(task)
        source = self._source.tools
        assert source is not None  # the "chat" harness has them
        try:
            async with on_stage(source) as stage:
                own = task.toolsets(task.config)  # those elsewhere; the stage keeps the others
                urls = {toolset.server_name: toolset.config.url for toolset in own}
                tools, listed = await stage.tools(trace, urls | source.urls, 60.0)
                for turn in range(self._max_turns):
                    said = given[turn] if turn < len(given) else self._player.next_turn(task, messages, rng)
                    messages.append(said)
                    for call in said.get("tool_calls") or ():
                        messages.append(await tools.answer(call))
                    if not said.get("tool_calls"):
                        break
                trace.nodes = _nodes(messages)
                trace.stop_condition = "max_turns" if messages[-1]["role"] == "tool" else None
        except EnvError:
            raise
        except ToolFailure as error:
            raise EnvError(f"taskset {taskset_id!r}: a rollout of task {task.data.idx} fails: {error}") from error
        except Exception as error:  # the taskset's own code
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise EnvError(f"taskset {taskset_id!r}: task {task.data.idx} can't be played: {cause}") from error
        return messages, listed, trace

    async def _sites(self, task: vf.Task, trace: vf.Trace) -> list[ErrorSite]:
        """The turns that a hint may be for: those whose call failed, and the last one where the conversation earned
        less than another did, or nothing, and the task has a hint for that."""
        sites = error_sites(trace.nodes)
        if not hasattr(task, "outcome_hint"):
            return sites
        await self._score(task, trace)
        if not trace.rewards:  # they need what only a run has
            return sites
        is_poor, self._most = trace.reward < self._most or trace.reward <= 0, max(self._most, trace.reward)
        outcome = outcome_site(trace, task.outcome_hint(trace) if is_poor else None)  # type: ignore[attr-defined]
        if outcome is None or outcome.hint is None or any(site.turn == outcome.turn for site in sites):
            return sites
        return [*sites, outcome]

    async def _score(self, task: vf.Task, trace: vf.Trace) -> None:
        try:
            await task.score(trace)
        except Exception as error:  # the taskset's own code
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise EnvError(
                f"taskset {self._player.taskset_id!r}: task {task.data.idx} can't be scored: {cause}"
            ) from error

    def _opening(self, task: vf.Task) -> list[Message]:
        messages = self._harness.conversation(task.data)
        faulty = next((message for message in messages if not isinstance(message.get("content"), str)), None)
        if not messages or faulty is not None:
            what = "has no prompt" if faulty is None else f"has a {faulty['role']} message that isn't text alone"
            raise EnvError(
                f"taskset {self._player.taskset_id!r}: task {task.data.idx} {what}: give its data a prompt of text"
            )
        return messages

    def _hinted(
        self,
        task: vf.Task,
        tools: list[dict[str, Any]],
        messages: Sequence[Message],
        site: ErrorSite,
        rng: random.Random,
    ) -> Demonstration | None:
        """What the player says in place of a turn that a hint is for, when it is shown that; None: there is none, or no
        place for it, as in a site."""
        text = hint_text(site, {})
        before = list(messages[: site.turn])
        is_secret = text is not None and leaks(text, task.data, said_before(_nodes(messages), site.turn))
        if text is None or is_secret or before[-1]["role"] not in ("user", "tool"):
            return None
        before[-1] = {**before[-1], "content": before[-1]["content"] + text}
        said = self._player.next_turn(task, before, rng)
        return Demonstration(task, tools, [*before, said], (len(before),), hinted=True)


def _turns(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


def _nodes(messages: Sequence[Message]) -> list[MessageNode]:
    """The messages as nodes of a trace, for what looks for errors in one."""
    return [
        MessageNode.model_validate(
            {
                "parent": place - 1 if place else None,
                "message": message
                | {"tool_calls": [{"id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()]},
                "sampled": message["role"] == "assistant",
                "token_ids": [0],
                "mask": [message["role"] == "assistant"],
            }
        )
        for place, message in enumerate(messages)
    ]
