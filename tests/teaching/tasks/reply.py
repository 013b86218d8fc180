"""`Say dcb`: one turn without tools, whose right reply is `<dcb>`. A hint comes for the reply that earned nothing."""

# pyright: reportInvalidTypeArguments=false, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from words import WordData, WordsConfig, draw_words, hint_of, other

__all__ = ["ReplyTaskset"]


class ReplyTask(vf.Task[WordData, vf.State]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == f"<{self.data.word}>")

    def outcome_hint(self, trace: vf.Trace) -> str:
        return "put it in < and >" if trace.last_reply.strip("<>") == self.data.word else "copy the word"


class ReplyTaskset(vf.Taskset[ReplyTask, WordsConfig]):
    def load(self) -> Iterator[ReplyTask]:
        for data in draw_words(self.config):
            yield ReplyTask(WordData(**data, prompt=f"Say {data['word']}"), self.config.task)

    def play(self, task: ReplyTask, messages: list[dict[str, Any]], rng: random.Random) -> str:
        hint, word = hint_of(messages), task.data.word
        if not hint and rng.random() < 0.1:
            word = other(word, rng)
        return f"<{word}>" if "<" in hint or rng.random() < self.config.skill else word
