"""Three kinds of talk with a policy: a question, a question and a further one, and a question with a tool at hand."""

import random
from collections.abc import Iterator
from typing import Literal, cast

import verifiers.v1 as vf

__all__ = ["FamilyEnv", "FamilyTaskset"]

QUESTION, FURTHER, ASKED = "What is in box d?", "And in box e?", "Look into box d."
"""ASKED: with a tool at hand, which not every template shows."""
SYSTEM = "Be brief."


class FamilyConfig(vf.TasksetConfig):
    kind: Literal["chat", "turns", "tools"] = "chat"
    system: bool = True
    """Whether a system message begins the talk."""


class Boxes(vf.Toolset):
    TOOL_PREFIX = None

    @vf.tool
    def look(self, box: str) -> str:
        """Look into a box."""
        return f"a key of box {box}"


class FamilyTask(vf.Task):
    @vf.reward
    async def drawn(self, trace: vf.Trace) -> float:
        """By lot: a group's rewards differ, even where its answers don't, so that every step trains."""
        return random.random()


class ToolTask(FamilyTask):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Boxes(vf.ToolsetConfig())]


class FamilyTaskset(vf.Taskset[FamilyTask, FamilyConfig]):
    def load(self) -> Iterator[FamilyTask]:
        kind = ToolTask if self.config.kind == "tools" else FamilyTask
        for idx in range(8):
            data = {
                "idx": idx,
                "prompt": ASKED if kind is ToolTask else QUESTION,
                "system_prompt": SYSTEM if self.config.system else None,
            }
            yield kind(vf.TaskData.model_validate(data), self.config.task)


class FamilyEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class FamilyEnv(vf.Env[FamilyEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """The user comes back once where the kind is "turns"."""
        async with agents.agent.interaction(task) as talk:
            answer = await talk.turn()
            if cast(FamilyConfig, self.config.taskset).kind == "turns" and not answer.terminated:
                await talk.turn(FURTHER)
