"""The tools of one conversation: which there are, what each call answers, and what the calls came to in numbers."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers.v1 as vf

from composer_prime.hints.answers import find_error
from composer_prime.metrics import TOOLS_CALLS, TOOLS_ERRORS
from composer_prime.sites.embedded.tools.external import ExternalServer
from composer_prime.sites.embedded.tools.failures import ToolFailure
from composer_prime.sites.embedded.tools.in_process import ToolsetThread
from composer_prime.sites.embedded.tools.listing import ToolSpec, check_names

TOOLS_SECONDS = "tools/seconds"
"""Seconds until calls were answered, summed over a rollout; a step's record has their mean instead."""


class RolloutTools:
    """Answers one conversation's calls until `close`.

    toolsets   the task's own, served for this conversation alone.
    shared     the taskset's, which serve all conversations: a thread and what it serves.
    external   MCP servers by their names.
    timeout_s  seconds that one call may take.
    """

    def __init__(
        self,
        toolsets: Sequence[vf.Toolset],
        trace: vf.Trace,
        shared: "SharedTools",
        external: Mapping[str, ExternalServer],
        timeout_s: float,
    ) -> None:
        self._own = ToolsetThread(toolsets, trace.task.data) if toolsets else None
        self._trace = trace
        self._shared = shared
        self._external = external
        self._timeout_s = timeout_s
        self._found: dict[str, tuple[ToolSpec, ToolsetThread | ExternalServer]] = {}
        self._counts = Counter[str]()

    async def open(self) -> list[dict[str, Any]]:
        """Set the toolsets up; the tools as a chat completion request lists them.

        Raises ToolFailure for two tools of one name or a bad schema, and what a toolset raised.
        """
        found: list[tuple[ToolSpec, ToolsetThread | ExternalServer]] = [*self._shared.found]
        for name, server in self._external.items():
            found += [(spec, server) for spec in await server.list_tools(name)]
        if self._own is not None:
            found += [(spec, self._own) for spec in await self._own.open()]
        check_names([spec for spec, _ in found])
        self._found = {spec.full_name: (spec, server) for spec, server in found}
        return [spec.to_wire() for spec, _ in found]

    async def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The tool message that answers one call of a chat completion, errors in the words of verifiers' harnesses.

        Raises ToolFailure where a tool gives no answer that can be read.
        """
        name = call["function"]["name"]
        began = time.monotonic()
        try:
            content = await self._answer(name, call["function"]["arguments"])
        except ToolFailure as failure:
            self._count(began, type(failure).__name__)
            raise
        error = find_error(content)
        self._count(began, None if error is None else error[0])
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    async def close(self) -> None:
        """End what served this conversation alone."""
        if self._own is not None:
            await self._own.close()

    async def _answer(self, name: str, text: str | None) -> str:
        try:
            arguments = json.loads(text or "{}")
        except ValueError as error:
            return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
        if not isinstance(arguments, dict):
            got = type(arguments).__name__
            return f"error: tool arguments must be a JSON object, got {got}; resend as an object"
        if name not in self._found:
            return f"error: unknown tool {name!r}"
        spec, server = self._found[name]
        if isinstance(server, ExternalServer):
            return await server.call(spec.name, arguments, self._timeout_s)
        return await server.call(spec, arguments, self._timeout_s, self._trace)

    def _count(self, began: float, error: str | None) -> None:
        self._counts[TOOLS_CALLS] += 1
        self._counts[TOOLS_SECONDS] += time.monotonic() - began  # type: ignore[assignment]
        if error is not None:
            self._counts[TOOLS_ERRORS] += 1
            self._counts[f"{TOOLS_ERRORS}/{error}"] += 1
        self._trace.record_metrics({name: float(value) for name, value in self._counts.items()})


class SharedTools:
    """A taskset's own toolsets, served for as long as the site plays."""

    def __init__(self, toolsets: Sequence[vf.Toolset]) -> None:
        self.found: list[tuple[ToolSpec, ToolsetThread | ExternalServer]] = []
        self._thread = ToolsetThread(toolsets, None) if toolsets else None

    async def open(self) -> None:
        """Set them up. Raises what a toolset raised."""
        if self._thread is not None:
            self.found = [(spec, self._thread) for spec in await self._thread.open()]

    async def close(self) -> None:
        """End them."""
        if self._thread is not None:
            await self._thread.close()
