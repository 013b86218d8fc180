"""Throw-away environments with tools, and policies that say what they are told: what the tests here are made of."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import itertools
import json
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import verifiers.v1 as vf

from composer_prime.sites.embedded.rollouts import Rollout

Build = Callable[[], list[vf.Toolset]]
Reply = Callable[[str], str]

_counter = itertools.count()


def environment(
    tools: Build = list,
    *,
    shared: Build = list,
    reward: Callable[[vf.Trace], float] = lambda trace: 1.0,
    state: type[vf.State] = vf.State,
    prompt: str = "Go",
) -> ModuleType:
    """A module as a taskset's package is one: `tools` builds each rollout's toolsets, `shared` the taskset's."""

    class Exercise(vf.Task[vf.TaskData, state]):  # type: ignore[valid-type]
        @classmethod
        def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
            return tools()

        @vf.reward
        async def rewarded(self, trace: vf.Trace) -> float:
            return reward(trace)

    class Exercises(vf.Taskset[Exercise, vf.TasksetConfig]):
        @classmethod
        def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
            return shared()

        def load(self) -> list[Exercise]:
            return [Exercise(vf.TaskData(prompt=prompt), self.config.task)]

    module = ModuleType(f"made_up_tools_{next(_counter)}")
    vars(module).update(Exercises=Exercises, __all__=["Exercises"])
    return module


def own(*toolsets: type[vf.Toolset], **config: Any) -> Build:
    """Builds an instance of each class."""
    return lambda: [toolset(vf.ToolsetConfig(**config)) for toolset in toolsets]


def call(name: str, arguments: Any = None) -> str:
    """What the policy says to call a tool."""
    asked = {"name": name, "arguments": {} if arguments is None else arguments}
    return f"<tool_call>\n{json.dumps(asked)}\n</tool_call>"


def turn_of(prompt: str) -> int:
    """Which of the policy's turns a prompt asks for, from 0."""
    return prompt.count("<|im_start|>assistant") - 1


def says(*turns: str) -> Reply:
    """A policy that says one text a turn, the last one again and again."""
    return lambda prompt: turns[min(turn_of(prompt), len(turns) - 1)]


def each_says(firsts: Sequence[str], then: str = "done") -> Reply:
    """A policy whose n-th conversation begins with the n-th of `firsts` and ends with `then`."""
    begun = itertools.count()
    return lambda prompt: firsts[next(begun)] if turn_of(prompt) == 0 else then


def answers(rollout: Rollout) -> list[str]:
    """What tools answered in a rollout, in order."""
    return [message.text for message in rollout.messages if message.role == "tool"]
