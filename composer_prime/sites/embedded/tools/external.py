"""MCP servers elsewhere, by the official client: one connection a server for all rollouts of a site.

The client's contexts must be left in the task that entered them, so that each connection has a task of its own.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from composer_prime.sites.embedded.tools.listing import (
    ToolDied,
    ToolSpec,
    ToolTimeout,
    is_cancelled,
    read_blocks,
    specs_of,
)

CONNECT_TIMEOUT_S = 60.0
_CONNECTION_CLOSED = "Connection closed"
"""What the client itself says of a lost connection, under a code that servers may use, too."""

T = TypeVar("T")


class ExternalServer:
    """One server; connected when first asked, and again after the connection was lost."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._owner: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None

    async def list_tools(self, name: str) -> list[ToolSpec]:
        """The server's tools under `name`. Raises ToolDied when it can't be reached, ToolFailure for a bad schema."""
        listed = await self._ask(lambda client: client.list_tools(), "its list of tools", CONNECT_TIMEOUT_S)
        return specs_of(name, listed.tools)

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """One call's answer. Raises ToolTimeout, ToolDied, ToolGarbage; the next call then connects anew."""
        result = await self._ask(lambda client: client.call_tool(tool, arguments), f"tool {tool}", timeout_s)
        return read_blocks(result.content, tool)

    async def close(self) -> None:
        """Leave the connection."""
        owner, self._owner, self._client = self._owner, None, None
        if owner is not None:
            owner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await owner

    async def _ask(self, question: Callable[[Any], Awaitable[T]], what: str, timeout_s: float) -> T:
        asked = self._connect()
        try:
            client = await asyncio.wait_for(asyncio.shield(asked), CONNECT_TIMEOUT_S)
        except (Exception, asyncio.CancelledError) as error:  # whatever the client and its transports raise
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            self._forget(asked)
            raise ToolDied(f"{what}: MCP server {self.url} can't be reached: {_cause(error)}") from error
        try:
            return await asyncio.wait_for(question(client), timeout_s)
        except TimeoutError:
            raise ToolTimeout(
                f"{what}: MCP server {self.url} gave no answer within harness.tool_timeout ({timeout_s:g} s)"
            ) from None
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if not _is_refusal(error):
                self._forget(asked)
            raise ToolDied(f"{what}: MCP server {self.url} failed: {_cause(error)}") from error

    def _connect(self) -> "asyncio.Future[Any]":
        if self._client is None or self._owner is None or self._owner.done():
            self._client = asyncio.get_running_loop().create_future()
            self._owner = asyncio.create_task(_own(self.url, self._client))
        return self._client

    def _forget(self, asked: "asyncio.Future[Any]") -> None:
        if self._client is asked and self._owner is not None:
            self._owner.cancel()
            self._owner = self._client = None


async def _own(url: str, client: "asyncio.Future[Any]") -> None:
    """Connect, hand the client out, and hold the connection until cancelled."""
    try:
        async with contextlib.AsyncExitStack() as stack:
            connected = await _enter(url, stack)
            client.set_result(connected)
            await asyncio.Future()
    except asyncio.CancelledError:
        client.cancel()
        raise
    except Exception as error:
        if not client.done():
            client.set_exception(error)


async def _enter(url: str, stack: contextlib.AsyncExitStack) -> Any:
    try:
        from mcp import Client  # mcp 2
    except ImportError:
        from mcp import ClientSession
        from mcp.client.streamable_http import streamablehttp_client  # type: ignore[attr-defined]

        read, write, _ = await stack.enter_async_context(streamablehttp_client(url))
        session = await stack.enter_async_context(ClientSession(read, write))
        await session.initialize()
        return session
    return await stack.enter_async_context(Client(url))


def _is_refusal(error: BaseException) -> bool:
    """Whether the server answered, if with an error: the connection is as good as before."""
    answer = getattr(error, "error", None)  # of mcp 1's McpError and mcp 2's MCPError
    return answer is not None and getattr(answer, "message", "") != _CONNECTION_CLOSED


def _cause(error: BaseException) -> str:
    """The innermost error, out of the groups that the client's tasks raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {str(error)[:300]}" if str(error) else type(error).__name__
