"""Find the code of the letter in a box, with tools: `Code in box b` is answered by `h` if that is what they say.

    open(box) -> d      code(letter) -> h      unlock(box) -> unlocked

Three turns are enough: open, code, reply. Letter and code are drawn for each box and stand nowhere but behind the
tools. With `locks` every box must be unlocked so many times first, which nothing in the task says before `open` fails:
with 3 + `locks` turns to spend (`env.agent.max_turns`) who begins with `open` can't succeed.
"""

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["ToolLettersTaskset"]

LETTERS = "abcdefghij"
"""One names a box; two of the others are what it holds and that one's code."""


class ToolLettersConfig(vf.TasksetConfig):
    """Which boxes a run trains on. All sites of a run share everything but `shard`."""

    seed: int = 0
    """Draws the boxes of the whole run; shards are cut from one draw, so it is the same at every site."""
    num_examples: int = Field(128, ge=1)
    """Boxes in a shard, the same at every site."""
    num_shards: int = Field(1, ge=1)
    """How many shards the run has. A site that joins later may count more: the shards before its own stay."""
    shard: int = Field(0, ge=0)
    """Which shard is ours, from 0 to `num_shards - 1`."""
    locks: int = Field(0, ge=0, le=8)
    """How many times every box must be unlocked before it opens."""


class ToolLettersData(vf.TaskData):
    """One box: its name stands in the prompt; `answer`, the code of its letter, is what the policy must say."""

    box: str
    letter: str
    answer: str
    locks: int


class BoxState(vf.State):
    """What the tools have told in this rollout."""

    has_code: bool = False


class BoxTools(vf.Toolset[vf.ToolsetConfig, BoxState]):
    """The tools of one rollout. A call that fails is answered by a JSON object that says why, of which kind the error
    is, and what to do instead."""

    TOOL_PREFIX = None

    async def setup_task(self, task: ToolLettersData) -> None:
        """Put the task's box where the tools find it."""
        self.box, self.letter, self.answer, self.locks = task.box, task.letter, task.answer, task.locks
        self.is_open = False

    @vf.tool
    def open(self, box: str) -> str:
        """Letter in a box."""
        if box != self.box:
            return failed(f"no box {box}", "bad_arguments", "copy the box")
        if self.locks:
            return failed("locked", "error", "call unlock first")
        self.is_open = True
        return self.letter

    @vf.tool
    def code(self, letter: str) -> str:
        """Code of a letter."""
        if not self.is_open:
            return failed("not open", "error", "call open first")
        if letter != self.letter:
            advice = "say the code" if self.state.has_code else "copy the letter"
            return failed(f"no letter {letter}", "bad_arguments", advice)
        self.state.has_code = True
        return self.answer

    @vf.tool
    def unlock(self, box: str) -> str:
        """Unlock a box."""
        if box != self.box:
            return failed(f"no box {box}", "bad_arguments", "copy the box")
        if not self.locks:
            return failed("not locked", "error", "call open first")
        self.locks -= 1
        return "locked" if self.locks else "unlocked"


def failed(error: str, kind: str, hint: str) -> str:
    """The answer to a call that failed; `kind` is one that hint distillation knows."""
    return json.dumps({"error": error[:40], "error_kind": kind, "hint": hint})


class ToolLettersTask(vf.Task[ToolLettersData, BoxState]):
    """Says whether the last reply is the code that the tools told."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """Tools of its own for each rollout: a box that one has unlocked is locked for the others."""
        return [BoxTools(vf.ToolsetConfig())]  # pyright: ignore[reportReturnType]

    @vf.reward
    async def exact_match(self, trace: vf.Trace) -> float:
        """1.0 when the last reply, white space around it stripped, is the answer and no guess; else 0.0."""
        has_code = trace.state.has_code  # pyright: ignore[reportAttributeAccessIssue]
        return float(has_code and trace.last_reply == self.data.answer)


class ToolLettersTaskset(vf.Taskset[ToolLettersTask, ToolLettersConfig]):  # pyright: ignore[reportInvalidTypeArguments]
    """The boxes of one shard as tasks."""

    ERROR_KINDS = ("bad_arguments", "error")
    """The kinds of errors that the tools' answers name."""

    def load(self) -> Iterator[ToolLettersTask]:
        """Yield `num_examples` tasks; the same config always yields the same ones. Raises ValueError for a shard that
        isn't there, and for more boxes than can be told apart."""
        for idx, (box, letter, answer) in enumerate(draw_boxes(self.config)):
            data = {"idx": idx, "prompt": f"Code in box {box}", "box": box, "letter": letter, "answer": answer}
            yield ToolLettersTask(ToolLettersData.model_validate(data | {"locks": self.config.locks}), self.config.task)

    def play(self, task: ToolLettersTask, messages: list[dict[str, Any]], rng: random.Random) -> dict[str, Any] | str:
        """The next message of a player who is right about every other time, and heeds a hint at the end of the last
        message: `tiny_policy` makes a policy that does the same. Nobody unlocks a box unless a hint says so."""
        box, letter, answer = task.data.box, task.data.letter, task.data.answer
        told = [message["content"].partition("\n\nHint: ")[0] for message in messages if message["role"] == "tool"]
        hint = messages[-1]["content"].partition("\n\nHint: ")[2]
        if "call unlock" in hint:
            return call("unlock", box=box)
        right = call("open", box=box)
        if answer in told:
            right = answer
        elif letter in told:
            right = call("code", letter=letter)
        wrong = [call("look", box=box), call("code", letter=box), box]
        return right if hint or rng.random() < 0.5 else rng.choice(wrong)


def call(tool: str, **arguments: str) -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    return {"content": "", "tool_calls": [{"name": tool, "arguments": arguments}]}


def draw_boxes(config: ToolLettersConfig) -> list[tuple[str, str, str]]:
    """Name, letter and code of each box of shard `shard`: a stretch of one endless seeded draw without repeats."""
    num_boxes = math.perm(len(LETTERS), 3)
    wanted = config.num_shards * config.num_examples
    if config.shard >= config.num_shards:
        raise ValueError(
            f"shard ({config.shard}) must be smaller than num_shards ({config.num_shards}): shards count from 0"
        )
    if wanted > num_boxes:
        raise ValueError(
            f"num_shards x num_examples ({config.num_shards} x {config.num_examples} = {wanted}) must not exceed the "
            f"{num_boxes} boxes there are: lower num_examples"
        )
    start = config.shard * config.num_examples
    random_source, drawn = random.Random(config.seed), dict[tuple[str, str, str], None]()
    while len(drawn) < start + config.num_examples:
        box, letter, answer = random_source.sample(LETTERS, 3)
        drawn[box, letter, answer] = None
    return list(drawn)[start:]
