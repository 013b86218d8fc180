"""`Rent dcb`: two turns, `ask(room)` for a key and `enter(room, key)` with it. Nothing but a hint says `ask`.

The player enters with the room's own name as the key, and asks when a hint says so.
"""

# pyright: reportInvalidTypeArguments=false, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from words import LETTERS, WordData, WordsConfig, call, draw_words, failed, hint_of

__all__ = ["DeskTaskset"]


class RoomData(WordData):
    key: str


class RoomState(vf.State):
    is_in: bool = False


class Desk(vf.Toolset[vf.ToolsetConfig, RoomState]):
    TOOL_PREFIX = None

    async def setup_task(self, task: RoomData) -> None:
        self.task = task

    @vf.tool
    def ask(self, room: str) -> str:
        """Ask about a room."""
        return self.task.key if room == self.task.word else failed("no such room", "copy the room", "bad_arguments")

    @vf.tool
    def enter(self, room: str, key: str) -> str:
        """Enter a room."""
        if room != self.task.word:
            return failed("no such room", "copy the room", "bad_arguments")
        if key != self.task.key:
            return failed("wrong key", "call ask first")
        self.state.is_in = True
        return "in"


class RoomTask(vf.Task[RoomData, RoomState]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Desk(vf.ToolsetConfig())]

    @vf.reward
    async def is_in(self, trace: vf.Trace) -> float:
        return float(trace.state.is_in)


class DeskTaskset(vf.Taskset[RoomTask, WordsConfig]):
    ERROR_KINDS = ("bad_arguments", "error")

    def load(self) -> Iterator[RoomTask]:
        for data in draw_words(self.config):
            key = "".join(random.Random(f"key {data['word']}").choices(LETTERS, k=3))
            yield RoomTask(RoomData(**data, prompt=f"Rent {data['word']}", key=key), self.config.task)

    def play(self, task: RoomTask, messages: list[dict[str, Any]], rng: random.Random) -> dict[str, Any] | str:
        told = [message["content"] for message in messages if message["role"] == "tool"]
        room = task.data.word
        if any(each.startswith("in") for each in told):
            return "ok"
        if "call ask" in hint_of(messages) or rng.random() < self.config.skill:
            return call("ask", room=room)
        key = next((each.partition("\n")[0] for each in told if each.startswith(task.data.key)), room)
        return call("enter", room=room, key=key)
