"""A taskset whose conversations begin with a tool's answer, an error in every second one: a plain chat then goes on."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["FailingToolTaskset"]

ERROR = "Traceback (most recent call last):\nKeyError: 'name'"


class FailingToolConfig(vf.TasksetConfig):
    """Nothing but how much the tool's answer says, to make conversations of any length."""

    num_lines: int = 1


class FailingToolTask(vf.Task[vf.TaskData]):
    """Rewarded for a reply of any kind."""

    @vf.reward
    async def replied(self, trace: vf.Trace) -> float:
        return float(bool(trace.last_reply))


class FailingToolTaskset(vf.Taskset[FailingToolTask, FailingToolConfig]):
    """Two tasks: the tool fails, and the tool is fine."""

    def load(self) -> Iterator[FailingToolTask]:
        for answer in ("line\n" * self.config.num_lines + ERROR, "fine"):
            call = {"id": "call-1", "name": "lookup", "arguments": '{"key": "name"}'}
            prompt = [
                {"role": "user", "content": "What is the name?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call-1", "name": "lookup", "content": answer},
            ]
            yield FailingToolTask(vf.TaskData.model_validate({"prompt": prompt}), self.config.task)
