"""The tools of each conversation, kept from verifiers, which would start a process for each, and played inside ours.

verifiers asks a task for its toolsets when a rollout opens, and knows no other way. So the tasks of a source that the
"chat" harness plays are of a class that names only the servers elsewhere, and remembers the rest here. While no stage
is set (a source's tools in use by someone else), that class answers as the task's own does.
"""

import contextlib
import functools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.state import state_cls

from composer_prime.errors import EnvError
from composer_prime.hints.answers import find_error
from composer_prime.metrics import TOOLS_CALLS, TOOLS_ERRORS
from composer_prime.sites.embedded.tools.external import ExternalServer
from composer_prime.sites.embedded.tools.in_process import OPEN_TIMEOUT_S, ToolsetThread
from composer_prime.sites.embedded.tools.listing import ToolFailure, ToolSpec, check_names

TOOLS_SECONDS = "tools/seconds"
"""Seconds until calls were answered, summed over a rollout; a step's record has their mean instead."""


class RolloutTools:
    """Answers one conversation's calls until `close`.

    toolsets   the task's own, served for this conversation alone.
    shared     the taskset's, which serve all conversations: each tool and the thread that serves it.
    external   MCP servers by their names.
    timeout_s  seconds that one call may take.
    """

    def __init__(
        self,
        toolsets: Sequence[vf.Toolset],
        trace: vf.Trace,
        shared: Sequence[tuple[ToolSpec, ToolsetThread]],
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
        found: list[tuple[ToolSpec, ToolsetThread | ExternalServer]] = [*self._shared]
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


class SourceTools:
    """What the rollouts of one source share: its taskset's own toolsets, and connections to servers elsewhere."""

    def __init__(self, shared: Sequence[vf.Toolset] = ()) -> None:
        self.urls = _urls(shared)
        ours = [toolset for toolset in shared if not toolset.config.url]
        self._thread = ToolsetThread(ours, None) if ours else None
        self.shared: list[tuple[ToolSpec, ToolsetThread]] = []
        """The shared toolsets' tools, once they are open."""
        self._servers: dict[str, ExternalServer] = {}

    def server(self, url: str) -> ExternalServer:
        """The one connection to the MCP server at that address."""
        if url not in self._servers:
            self._servers[url] = ExternalServer(url)
        return self._servers[url]

    async def open(self, name: str, task: vf.Task) -> None:
        """Set up the shared toolsets, and to see that it works all that a rollout of `task` needs.

        Raises EnvError, with the toolset's own words, for a toolset or a server that doesn't start, a schema that
        isn't one and two tools of one name.
        """
        seat = vf.TraceTask(type=type(task).__name__, data=task.data)
        trace = vf.Trace.model_construct(task=seat, state=state_cls(type(task))())  # played by nobody
        async with on_stage(self) as stage:
            try:
                if self._thread is not None:
                    self.shared = [(spec, self._thread) for spec in await self._thread.open()]
                own = _urls(task.toolsets(task.config))
                if twice := own.keys() & self.urls.keys():
                    raise ToolFailure(f"two tool servers are called {min(twice)}: give one another TOOL_PREFIX")
                await stage.tools(trace, own | self.urls, OPEN_TIMEOUT_S)
            except Exception as error:  # the environment's own code
                cause = " ".join(str(error).split()) or "it gave no answer in time"
                raise EnvError(
                    f"environment {name!r}: its tools can't be used: {type(error).__name__}: {cause}"
                ) from error

    async def close(self) -> None:
        """End the shared toolsets and leave the connections."""
        if self._thread is not None:
            await self._thread.close()
        for server in self._servers.values():
            await server.close()


def _urls(toolsets: Sequence[vf.Toolset]) -> dict[str, str]:
    """The addresses of those that are served elsewhere, by their servers' names. Raises ToolFailure for two of one."""
    elsewhere = [toolset for toolset in toolsets if toolset.config.url]
    names = [toolset.server_name for toolset in elsewhere]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ToolFailure(f"two tool servers are called {min(twice)}: give one another TOOL_PREFIX")
    return {toolset.server_name: toolset.config.url for toolset in elsewhere}


class Stage:
    """One rollout's tools: those of each trace in it, by the trace's id."""

    def __init__(self, source: SourceTools) -> None:
        self._source = source
        self._build: dict[str, Callable[[], list[vf.Toolset]]] = {}
        self._tools: dict[str, tuple[RolloutTools, list[dict[str, Any]]]] = {}

    def keep(self, task_type: str, build: Callable[[], list[vf.Toolset]]) -> None:
        """Remember how the toolsets of a task of this type are built: each trace has its own."""
        self._build[task_type] = build

    async def tools(
        self, trace: vf.Trace, mcp_urls: dict[str, str], timeout_s: float
    ) -> tuple[RolloutTools, list[dict[str, Any]]]:
        """The tools of a trace and their list for the policy, set up when first asked for."""
        if trace.id not in self._tools:
            external = {name: self._source.server(url) for name, url in mcp_urls.items()}
            build = self._build.get(trace.task.type, list)
            toolsets = [toolset for toolset in build() if not toolset.config.url]
            tools = RolloutTools(toolsets, trace, self._source.shared, external, timeout_s)
            self._tools[trace.id] = tools, []
            self._tools[trace.id] = tools, await tools.open()
        return self._tools[trace.id]

    async def close(self) -> None:
        """End what this rollout alone was served with."""
        for tools, _ in self._tools.values():
            await tools.close()


_stage: ContextVar[Stage | None] = ContextVar("stage", default=None)


@contextlib.asynccontextmanager
async def on_stage(source: SourceTools) -> AsyncIterator[Stage]:
    """Play one rollout in the body: its toolsets are kept from verifiers, and ended when the body is left."""
    stage = Stage(source)
    token = _stage.set(stage)
    try:
        yield stage
    finally:
        _stage.reset(token)
        await stage.close()


@contextlib.asynccontextmanager
async def this_stage() -> AsyncIterator[Stage]:
    """The stage of the rollout that runs; where none was set one of its own, for servers elsewhere."""
    stage = _stage.get()
    if stage is not None:
        yield stage
        return
    source = SourceTools()
    try:
        async with on_stage(source) as stage:
            yield stage
    finally:
        await source.close()


def keep_toolsets(env: vf.Env, tasks: Sequence[vf.Task]) -> SourceTools:
    """Keep an environment's toolsets from verifiers, in place: the taskset's shared ones and those of each task.

    Raises EnvError when the taskset's can't be built.
    """
    for task in tasks:
        task.__class__ = _kept(type(task))
    try:
        shared = env.taskset.toolsets(env.taskset.config)
        source = SourceTools(shared)
    except Exception as error:  # the taskset's own code
        raise EnvError(f"environment {env.taskset.config.id!r}: its toolsets can't be built: {error}") from error
    env.taskset.toolsets = lambda config: [toolset for toolset in shared if toolset.config.url]
    return source


@functools.cache
def _kept(task_class: type[vf.Task]) -> type[vf.Task]:
    """The class of its name whose `toolsets` are kept; made by assigning `__class__`, so that tasks which the
    environment makes by `type(task)(...)` are of it, too."""

    def toolsets(cls: type[vf.Task], config: Any) -> list[vf.Toolset]:
        built = task_class.toolsets(config)
        stage = _stage.get()
        if stage is None:
            return built
        stage.keep(cls.__name__, lambda: task_class.toolsets(config))
        return [toolset for toolset in built if toolset.config.url]

    namespace = {"toolsets": classmethod(toolsets), "__module__": task_class.__module__, "__doc__": task_class.__doc__}
    kept = type(task_class.__name__, (task_class,), namespace)
    kept.__qualname__ = task_class.__qualname__
    return kept
