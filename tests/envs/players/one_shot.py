"""`Send dcb`: one turn, one call, `send("[dcb]")`. Nothing says brackets but the hint of the call that fails.

Its player sends the bare word, and the word in brackets after that hint.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import json
import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["OneShotTaskset"]


class OneShotConfig(vf.TasksetConfig):
    seed: int = 0
    num_examples: int = 128


class OneShotData(vf.TaskData):
    word: str


class SentState(vf.State):
    done: bool = False


class Post(vf.Toolset[vf.ToolsetConfig, SentState]):
    TOOL_PREFIX = None

    async def setup_task(self, task: OneShotData) -> None:
        self.word = task.word

    @vf.tool
    def send(self, text: str) -> str:
        """Send a text."""
        self.state.done = text == f"[{self.word}]"
        hint = {"error": "bad format", "error_kind": "bad_arguments", "hint": "put it in brackets"}
        return "sent" if self.state.done else json.dumps(hint)


class OneShotTask(vf.Task[OneShotData, SentState]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Post(vf.ToolsetConfig())]

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.state.done)


class OneShotTaskset(vf.Taskset[OneShotTask, OneShotConfig]):  # pyright: ignore[reportInvalidTypeArguments] (own state)
    ERROR_KINDS = ("bad_arguments",)

    def load(self) -> Iterator[OneShotTask]:
        dice, words = random.Random(self.config.seed), dict[str, None]()
        while len(words) < self.config.num_examples:
            words["".join(dice.sample("abcdefghij", 3))] = None
        for idx, word in enumerate(words):
            yield OneShotTask(OneShotData(idx=idx, prompt=f"Send {word}", word=word), self.config.task)

    def play(self, task: OneShotTask, messages: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
        hinted = messages[-1]["content"].endswith("\n\nHint: put it in brackets")
        text = f"[{task.data.word}]" if hinted else task.data.word
        return {"content": "", "tool_calls": [{"name": "send", "arguments": {"text": text}}]}
