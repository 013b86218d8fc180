"""tool_letters, one in twenty of whose `open` calls hangs, ends its thread, or answers with what is no text."""

import random
import time

import verifiers.v1 as vf

import tool_letters

__all__ = ["FaultyLettersTaskset"]

SHARE = 0.05
_dice = random.Random(0)


class FaultyTools(tool_letters.BoxTools):
    """One toolset a rollout, as its parent; the dice are the process's."""

    @vf.tool
    def open(self, box: str) -> str:
        """Letter in a box."""
        fault = _dice.random()
        if fault < SHARE / 3:
            time.sleep(4.0)  # longer than the recipe lets it
        elif fault < 2 * SHARE / 3:
            raise SystemExit(3)
        elif fault < SHARE:
            return "\ud800 garbage"
        return super().open(box)


class FaultyTask(tool_letters.ToolLettersTask):
    """The same task with those tools."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """Tools of its own for each rollout."""
        return [FaultyTools(vf.ToolsetConfig())]  # pyright: ignore[reportReturnType] (own state)


class FaultyLettersTaskset(
    vf.Taskset[FaultyTask, tool_letters.ToolLettersConfig]  # pyright: ignore[reportInvalidTypeArguments] (own state)
):
    """The same boxes."""

    def load(self) -> list[FaultyTask]:
        """The tasks of the shard."""
        plain = tool_letters.ToolLettersTaskset(self.config)
        return [FaultyTask(task.data, task.config) for task in plain.load()]
