"""A taskset whose replies count as calls of a tool, which fail in every second conversation: a plain chat plays it."""

from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode

__all__ = ["FailingToolTaskset"]

ERROR = "Traceback (most recent call last):\nKeyError: 'name'"


class FailingToolConfig(vf.TasksetConfig):
    """Nothing but how much the prompt says, to make conversations of any length."""

    num_lines: int = 1
    error: str = ERROR
    """What the tool answers when it fails."""
    solution: str = ""
    """The tasks' answer, which nobody asks for."""


class FailingToolData(vf.TaskData):
    """What the tool will say, and the task's answer."""

    told: str
    answer: str


class FailingToolTask(vf.Task[FailingToolData]):
    """Rewarded for a reply of any kind."""

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """The tool's answer, as a harness leaves it that ends there: no tokens of it were ever sent."""
        message = {"role": "tool", "tool_call_id": "call-1", "name": "lookup", "content": self.data.told}
        trace.nodes.append(MessageNode.model_validate({"parent": len(trace.nodes) - 1, "message": message}))

    @vf.reward
    async def replied(self, trace: vf.Trace) -> float:
        return float(bool(trace.last_reply))


class FailingToolTaskset(vf.Taskset[FailingToolTask, FailingToolConfig]):
    """Two tasks: the tool fails, and the tool is fine."""

    def load(self) -> Iterator[FailingToolTask]:
        for told in (self.config.error, "fine"):
            prompt = "line\n" * self.config.num_lines + "What is the name?"
            data = FailingToolData.model_validate({"prompt": prompt, "told": told, "answer": self.config.solution})
            yield FailingToolTask(data, self.config.task)
