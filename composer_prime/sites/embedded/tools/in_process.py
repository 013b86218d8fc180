"""verifiers' Toolset classes inside our process: a thread with an event loop of its own for those of one rollout.

verifiers starts a Python process for each, which takes most of a second. A thread takes a fraction of a millisecond,
and a tool that blocks holds up this thread and nobody else. A thread can't be killed: one that a tool blocks for ever
is left behind, counted in `num_abandoned`, and ends with the process.
"""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import verifiers.v1 as vf

from composer_prime.sites.embedded.tools.listing import (
    ToolDied,
    ToolSpec,
    ToolTimeout,
    is_cancelled,
    read_blocks,
    read_text,
    specs_of,
)

try:
    from mcp.server.mcpserver import MCPServer  # mcp 2, with verifiers 0.4
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer  # type: ignore[import-not-found]  # mcp 1, of verifiers 0.3

OPEN_TIMEOUT_S = 60.0
"""Seconds that a toolset's `setup` and `setup_task` may take together."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds after which a thread that a tool blocks is left behind."""

T = TypeVar("T")

_abandoned: list[threading.Thread] = []
_calling: contextvars.ContextVar[vf.Trace] = contextvars.ContextVar("calling")


def num_abandoned() -> int:
    """Threads that were left behind and still run."""
    return sum(thread.is_alive() for thread in _abandoned)


class ToolsetThread:
    """Serves toolsets from `open` to `close`; calls come from the loop that opened it.

    toolsets  instances that nobody else serves.
    data      the task that they are set up for; None: they serve all tasks.
    """

    def __init__(self, toolsets: Sequence[vf.Toolset], data: vf.TaskData | None) -> None:
        self._toolsets = toolsets
        self._data = data
        self._servers: dict[ToolSpec, MCPServer] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="toolsets", daemon=True)
        self._opened: asyncio.Future[list[ToolSpec]]
        self._ended: asyncio.Event
        self._home: asyncio.AbstractEventLoop

    async def open(self) -> list[ToolSpec]:
        """Start, set the toolsets up and list their tools. Raises what a toolset raised; TimeoutError."""
        self._home = asyncio.get_running_loop()
        self._opened = self._home.create_future()
        self._ended = asyncio.Event()
        self._thread.start()
        return await asyncio.wait_for(self._opened, OPEN_TIMEOUT_S)

    async def call(self, spec: ToolSpec, arguments: dict[str, Any], timeout_s: float, trace: vf.Trace) -> str:
        """One call's answer as the policy reads it, an error's text too.

        trace  whose state the tool reads and writes, as over verifiers' state channel.

        Raises ToolTimeout, ToolDied when the thread has ended, ToolGarbage for an answer that isn't text.
        """
        if self._loop is None or not self._thread.is_alive():
            raise ToolDied(f"tool {spec.name}: its toolset has ended")
        return await self._within(_answer(self._servers[spec], spec.name, arguments, trace), spec.name, timeout_s)

    async def close(self) -> None:
        """End the toolsets as verifiers does; a thread that doesn't end is left behind."""
        if not self._thread.is_alive():
            return
        if self._loop is not None and self._closing is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
        try:
            await asyncio.wait_for(self._ended.wait(), CLOSE_TIMEOUT_S)
        except TimeoutError:
            _abandoned.append(self._thread)

    async def _within(self, work: Coroutine[Any, Any, T], tool: str, timeout_s: float) -> T:
        assert self._loop is not None
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise ToolDied(f"tool {tool}: its toolset has ended") from None
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            raise ToolTimeout(f"tool {tool} gave no answer within harness.tool_timeout ({timeout_s:g} s)") from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise ToolDied(f"tool {tool} or its toolset was cancelled from within") from None

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # a toolset's own code, which may also exit
            self._tell(self._opened, error)
        finally:
            with contextlib.suppress(RuntimeError):  # the rollout's loop is closed: nobody waits
                self._home.call_soon_threadsafe(self._ended.set)

    async def _serve(self) -> None:
        self._closing = asyncio.Event()
        specs: list[ToolSpec] = []
        async with contextlib.AsyncExitStack() as stack:
            for toolset in self._toolsets:
                _share_state(toolset)
                if self._data is None:
                    _free_the_loop(toolset)
                await stack.enter_async_context(toolset._exit_stack)
                await toolset.setup()
                if self._data is not None:
                    await toolset.setup_task(self._data)
                server = MCPServer(toolset.server_name or type(toolset).__name__)
                toolset.register(server)
                found = specs_of(toolset.server_name, await server.list_tools())
                self._servers |= dict.fromkeys(found, server)
                specs += found
            self._loop = asyncio.get_running_loop()
            self._tell(self._opened, specs)
            await self._closing.wait()

    def _tell(self, future: "asyncio.Future[Any]", value: Any) -> None:
        def tell() -> None:
            if future.done():
                return
            if isinstance(value, BaseException):
                ended = value if isinstance(value, Exception) else ToolDied(f"a toolset ended with {value!r}")
                future.set_exception(ended)
            else:
                future.set_result(value)

        with contextlib.suppress(RuntimeError):
            self._home.call_soon_threadsafe(tell)


async def _answer(server: MCPServer, tool: str, arguments: dict[str, Any], trace: vf.Trace) -> str:
    """What the tool's server would put on the wire: an error's text is an answer."""
    _calling.set(trace)  # in the context of the task that this call is
    try:
        result = await server.call_tool(tool, arguments)
    except (SystemExit, KeyboardInterrupt) as error:  # must not end the loop
        raise ToolDied(f"tool {tool} ended with {error!r}") from error
    except Exception as error:  # mcp's servers answer so, whatever a tool raised
        cause = error.__cause__
        while cause is not None:  # wrapped once, and twice from verifiers 0.4.1 on
            if isinstance(cause, ToolDied):
                raise cause from None
            cause = cause.__cause__
        return read_text(str(error), tool)
    blocks: Any = result[0] if isinstance(result, tuple) else getattr(result, "content", result)
    return read_blocks(blocks, tool)


def _share_state(toolset: vf.Toolset) -> None:
    """Let a toolset's `state` be the calling rollout's, in place of verifiers' HTTP channel: a copy for each call, put
    back whole when it changed."""

    async def pull() -> Any:
        return toolset._state_adapter.validate_json(_calling.get().state.model_dump_json())

    async def push(before: bytes) -> None:
        after = toolset._state_adapter.dump_json(toolset.state)
        if after != before:
            trace = _calling.get()
            trace.state = type(trace.state).model_validate_json(after)

    toolset._pull_state = pull  # type: ignore[method-assign]
    toolset._push_state = push  # type: ignore[method-assign]


def _free_the_loop(toolset: vf.Toolset) -> None:
    """Run a shared toolset's plain functions in threads of their own: one that hangs is one rollout's."""
    with_state = toolset._with_state

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        return with_state(function if inspect.iscoroutinefunction(function) else _threaded(function))

    toolset._with_state = wrapped  # type: ignore[method-assign]


def _threaded(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        answered: asyncio.Future[Any] = loop.create_future()

        def tell(give: Callable[[Any], None], value: Any) -> None:
            if not answered.done():
                give(value)

        def work() -> None:
            try:
                give, value = answered.set_result, context.run(function, *args, **kwargs)
            except Exception as error:
                give, value = answered.set_exception, error
            except BaseException as error:  # such as SystemExit
                give, value = answered.set_exception, ToolDied(f"tool {function.__name__} ended with {error!r}")
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(tell, give, value)

        thread = threading.Thread(target=work, name="tool", daemon=True)
        thread.start()
        try:
            return await answered
        except asyncio.CancelledError:
            _abandoned.append(thread)
            raise

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call
