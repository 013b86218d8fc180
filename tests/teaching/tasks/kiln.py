"""`Fire dcb`: four calls in their order, each with the name of the pot: `load`, `heat`, `glaze`, `cool`.

A call out of order fails, and its hint says which one comes before. The player takes a wrong one in three of ten.
"""

# pyright: reportInvalidTypeArguments=false, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from words import WordData, WordsConfig, call, draw_words, failed, hint_of

__all__ = ["KilnTaskset"]

ORDER = ("load", "heat", "glaze", "cool")


class KilnState(vf.State):
    num_done: int = 0


class Kiln(vf.Toolset[vf.ToolsetConfig, KilnState]):
    TOOL_PREFIX = None

    async def setup_task(self, task: WordData) -> None:
        self.word = task.word

    def _do(self, step: str, pot: str) -> str:
        if pot != self.word:
            return failed(f"no pot {pot}"[:40], "copy the pot", "bad_arguments")
        due = ORDER[min(self.state.num_done, len(ORDER) - 1)]
        if step != due:
            return failed("not yet", f"call {due} first")
        self.state.num_done += 1
        return "done"

    @vf.tool
    def load(self, pot: str) -> str:
        """Load a pot."""
        return self._do("load", pot)

    @vf.tool
    def heat(self, pot: str) -> str:
        """Heat a pot."""
        return self._do("heat", pot)

    @vf.tool
    def glaze(self, pot: str) -> str:
        """Glaze a pot."""
        return self._do("glaze", pot)

    @vf.tool
    def cool(self, pot: str) -> str:
        """Cool a pot."""
        return self._do("cool", pot)


class KilnTask(vf.Task[WordData, KilnState]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Kiln(vf.ToolsetConfig())]

    @vf.reward
    async def is_fired(self, trace: vf.Trace) -> float:
        return float(trace.state.num_done >= len(ORDER))


class KilnTaskset(vf.Taskset[KilnTask, WordsConfig]):
    ERROR_KINDS = ("bad_arguments", "error")

    def load(self) -> Iterator[KilnTask]:
        for data in draw_words(self.config):
            yield KilnTask(WordData(**data, prompt=f"Fire {data['word']}"), self.config.task)

    def play(self, task: KilnTask, messages: list[dict[str, Any]], rng: random.Random) -> dict[str, Any] | str:
        num_done = sum(message["role"] == "tool" and message["content"].startswith("done") for message in messages)
        if num_done >= len(ORDER):
            return "ok"
        hint = hint_of(messages)
        step = next((each for each in ORDER if f"call {each}" in hint), ORDER[num_done])
        return call(step if hint or rng.random() < self.config.skill else rng.choice(ORDER), pot=task.data.word)
