"""A real MCP server in a thread on loopback, which says what it was asked and can go away and come back."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.responses import JSONResponse

from tests.servers.in_thread import running_server


class ServedTools:
    """An MCP server that is there while it is entered, and between `start` and `stop`, always at one address.

    is_old    it knows nothing of the protocol without sessions.
    asked     how often it was asked for each of the protocol's methods.
    mute      methods that it never answers.
    was_mute  whether it didn't answer one.
    """

    def __init__(self, *tools: Callable[..., Any], is_old: bool = False) -> None:
        self.asked = Counter[str]()
        self.mute: set[str] = set()
        self.was_mute = threading.Event()
        self._tools = tools
        self._is_old = is_old
        self._stack = contextlib.ExitStack()
        self._port = 0

    @property
    def url(self) -> str:
        """Where it is served."""
        return f"http://127.0.0.1:{self._port}/mcp"

    @property
    def num_connections(self) -> int:
        """How many clients came."""
        return self.asked["initialize" if self._is_old else "server/discover"]

    def start(self) -> None:
        """Serve."""
        server = MCPServer("elsewhere")
        for tool in self._tools:
            server.add_tool(tool)
        app = self._watch(server.streamable_http_app())
        config = uvicorn.Config(app, log_level="critical", lifespan="on")
        listening = self._stack.enter_context(socket.create_server(("127.0.0.1", self._port)))
        self._port = listening.getsockname()[1]
        self._stack.enter_context(running_server(uvicorn.Server(config), [listening]))

    def stop(self) -> None:
        """Go away: requests find nobody until `start`."""
        self._stack.close()

    def __enter__(self) -> "ServedTools":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _watch(self, app: Any) -> Any:
        async def watching(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            body, more = b"", True
            while more:
                event = await receive()
                body, more = body + event.get("body", b""), event.get("more_body", False)
            asked = json.loads(body)
            self.asked[asked["method"]] += 1
            if self._is_old and asked["method"] == "server/discover":
                unknown = {"code": -32601, "message": "Method not found"}
                await JSONResponse({"jsonrpc": "2.0", "id": asked["id"], "error": unknown})(scope, receive, send)
                return
            while asked["method"] in self.mute:
                self.was_mute.set()
                if (await receive())["type"] == "http.disconnect":
                    return
            events = iter([{"type": "http.request", "body": body, "more_body": False}])

            async def replay() -> Any:
                return next(events, None) or await receive()

            await app(scope, replay, send)

        return watching
