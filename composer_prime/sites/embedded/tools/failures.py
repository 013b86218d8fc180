"""What ends a rollout when a tool does: verifiers records the class's name and the message with the rollout.

An answer that says that the call failed is none of these: the policy reads it and goes on.
"""

import asyncio

import verifiers.v1 as vf

__all__ = ["ToolDied", "ToolFailure", "ToolGarbage", "ToolTimeout", "is_cancelled"]


class ToolFailure(vf.ToolsetError):
    """A tool gave no answer that the policy could read."""


class ToolTimeout(ToolFailure):
    """It didn't answer within `harness.tool_timeout`."""


class ToolDied(ToolFailure):
    """Its server or its thread is gone, or the connection to it."""


class ToolGarbage(ToolFailure):
    """Its answer isn't text."""


def is_cancelled() -> bool:
    """Whether it is the running task that was cancelled, and not what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
