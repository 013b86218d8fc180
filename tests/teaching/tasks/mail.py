"""`Send dcb`: one call, `send("[dcb]")`, then a reply with the receipt's letter.

Nothing says brackets but the hint of a call that fails. Of `lost` of the words every mail is refused, by the same hint.
"""

# pyright: reportInvalidTypeArguments=false, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import random
import zlib
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field
from words import LETTERS, WordData, WordsConfig, call, draw_words, failed, hint_of, other

__all__ = ["MailTaskset"]


class MailConfig(WordsConfig):
    lost: float = Field(0.0, ge=0, le=1)


class MailData(WordData):
    is_lost: bool


class MailState(vf.State):
    receipt: str = ""


class Mail(vf.Toolset[vf.ToolsetConfig, MailState]):
    TOOL_PREFIX = None

    async def setup_task(self, task: MailData) -> None:
        self.task = task

    @vf.tool
    def send(self, text: str) -> str:
        """Send a text."""
        if text.strip("[]") != self.task.word:
            return failed("wrong word", "copy the word", "bad_arguments")
        if text != f"[{self.task.word}]" or self.task.is_lost:
            return failed("bad format", "put it in brackets", "bad_arguments")
        self.state.receipt = random.Random(self.task.word).choice(LETTERS)
        return f"receipt {self.state.receipt}"


class MailTask(vf.Task[MailData, MailState]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Mail(vf.ToolsetConfig())]

    @vf.reward
    async def has_receipt(self, trace: vf.Trace) -> float:
        return float(bool(trace.state.receipt) and trace.last_reply == trace.state.receipt)


class MailTaskset(vf.Taskset[MailTask, MailConfig]):
    ERROR_KINDS = ("bad_arguments",)

    def load(self) -> Iterator[MailTask]:
        for data in draw_words(self.config):
            is_lost = zlib.crc32(data["word"].encode()) / 2**32 < self.config.lost
            prompt = f"Send {data['word']}"
            yield MailTask(MailData(**data, prompt=prompt, is_lost=is_lost), self.config.task)

    def play(self, task: MailTask, messages: list[dict[str, Any]], rng: random.Random) -> dict[str, Any] | str:
        hint, word = hint_of(messages), task.data.word
        receipt = messages[-1]["content"].partition("receipt ")[2]
        if receipt:
            return receipt
        if not hint and rng.random() < 0.1:
            word = other(word, rng)
        has_brackets = "brackets" in hint or rng.random() < self.config.skill
        return call("send", text=f"[{word}]" if has_brackets else word)
