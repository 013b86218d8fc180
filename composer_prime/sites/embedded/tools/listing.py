"""What tools there are, what an answer's blocks say, and how a tool fails.

Alike for toolsets in our process and servers elsewhere.
"""

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from jsonschema import SchemaError
from jsonschema.validators import validator_for

MAX_ANSWER_BYTES = 20_000
"""Of a longer answer the policy sees the beginning and the end, as with verifiers' own harnesses."""
_BEFORE, _AFTER = re.compile(r"(?<!\S)\S{1,200}\Z"), re.compile(r"\A\S{1,200}(?!\S)")
"""The parts of a word beside a cut, which go too: half a secret wouldn't be known for one."""


class ToolFailure(vf.ToolsetError):
    """A tool gave no answer that the policy could read, which ends the rollout.

    verifiers records the class's name and the message with the rollout. An answer that says that the call failed is
    none of these: the policy reads it and goes on.
    """


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


@dataclass(frozen=True, eq=False)
class ToolSpec:
    """One tool: `server` has it as `name`; the policy calls it by `full_name`. Equal to itself alone."""

    server: str
    name: str
    description: str
    parameters: dict[str, Any]

    @property
    def full_name(self) -> str:
        """As verifiers' harnesses qualify it: the server's name in front, where it has one."""
        return f"{self.server}_{self.name}" if self.server else self.name

    def to_wire(self) -> dict[str, Any]:
        """The tool as a chat completion request lists it."""
        function = {"name": self.full_name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def specs_of(server: str, listed: Iterable[Any]) -> list[ToolSpec]:
    """The tools that an MCP server lists. Raises ToolFailure for a schema that isn't one."""
    specs = []
    for tool in listed:
        schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None)  # mcp 2, mcp 1
        specs.append(ToolSpec(server, tool.name, tool.description or "", _check_schema(tool.name, schema)))
    return specs


def check_names(specs: Sequence[ToolSpec]) -> None:
    """Raise ToolFailure when two tools bear one name."""
    names = [spec.full_name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ToolFailure(f"two tools are called {twice[0]}: give one toolset another TOOL_PREFIX")


def _check_schema(name: str, schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise ToolFailure(f"tool {name}: its input schema ({str(schema)[:80]}) must be a JSON schema of type object")
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise ToolFailure(f"tool {name}: its input schema isn't a JSON schema: {error.message[:200]}") from error
    return schema


def read_blocks(blocks: Sequence[Any], tool: str) -> str:
    """An answer's text, as verifiers' harnesses put it together. Raises ToolGarbage where a block isn't text."""
    kinds = [getattr(block, "type", type(block).__name__) for block in blocks]
    if any(kind != "text" for kind in kinds):
        raise ToolGarbage(f"tool {tool} answered with {', '.join(kinds)}: the policy reads text alone")
    return read_text("\n".join(block.text for block in blocks) if blocks else "[]", tool)


def read_text(text: str, tool: str) -> str:
    """An answer's text or an error's, cut where it is too long. Raises ToolGarbage for characters that are none."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise ToolGarbage(f"tool {tool} answered with characters that are none ({error.reason})") from error
    if len(data) <= MAX_ANSWER_BYTES:
        return text
    half = MAX_ANSWER_BYTES // 2
    head, tail = data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore")
    head, tail = _BEFORE.sub("", head), _AFTER.sub("", tail)
    return f"Warning: {len(data)} bytes, of which the middle is left out\n\n{head}\n[...]\n{tail}"
