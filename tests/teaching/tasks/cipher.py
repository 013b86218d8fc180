"""`Door dcb`: one call, `enter(pin)`, of a pin that says each letter in a secret alphabet, which `cipher` draws.

The hint of a call that fails tells what the letters of that door are. No warm-up can hold the alphabet: the player
guesses, and heeds the hint.
"""

# pyright: reportInvalidTypeArguments=false, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import random
import re
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from words import LETTERS, WordData, WordsConfig, call, draw_words, failed, hint_of

__all__ = ["CipherTaskset"]

SECRET = "klmnopqrst"


class CipherConfig(WordsConfig):
    cipher: int = 0


class DoorData(WordData):
    pin: str


class DoorState(vf.State):
    is_open: bool = False


class Door(vf.Toolset[vf.ToolsetConfig, DoorState]):
    TOOL_PREFIX = None

    async def setup_task(self, task: DoorData) -> None:
        self.task = task

    @vf.tool
    def enter(self, pin: str) -> str:
        """Enter a pin."""
        self.state.is_open = pin == self.task.pin
        told = ", ".join(f"{letter} is {secret}" for letter, secret in zip(self.task.word, self.task.pin, strict=True))
        return "open" if self.state.is_open else failed("wrong pin", told, "bad_arguments")


class DoorTask(vf.Task[DoorData, DoorState]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Door(vf.ToolsetConfig())]

    @vf.reward
    async def is_open(self, trace: vf.Trace) -> float:
        return float(trace.state.is_open)


class CipherTaskset(vf.Taskset[DoorTask, CipherConfig]):
    ERROR_KINDS = ("bad_arguments",)

    def load(self) -> Iterator[DoorTask]:
        secret = random.Random(f"cipher {self.config.cipher}").sample(SECRET, len(SECRET))
        alphabet = str.maketrans(dict(zip(LETTERS, secret, strict=True)))
        for data in draw_words(self.config):
            pin = data["word"].translate(alphabet)
            yield DoorTask(DoorData(**data, prompt=f"Door {data['word']}", pin=pin), self.config.task)

    def play(self, task: DoorTask, messages: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
        told = re.findall(r"\w is (\w)", hint_of(messages))
        return call("enter", pin="".join(told or rng.choices(SECRET, k=len(task.data.word))))
