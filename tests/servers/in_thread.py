"""Servers of tests that run in a thread of the test's own process, on a free loopback port."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import uvicorn


@contextmanager
def serving_app(app: Any, *, lifespan: Literal["auto", "on", "off"] = "off") -> Iterator[int]:
    """Serve an ASGI app; its port is yielded once it answers. A `Date` is the app's to send: uvicorn's may be old."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan=lifespan, date_header=False)
    server = uvicorn.Server(config)
    with running_server(server):
        yield server.servers[0].sockets[0].getsockname()[1]


@contextmanager
def running_server(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> Iterator[None]:
    """Run a server, which listens at `sockets` or as it was set up, until the block ends."""
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        yield
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@contextmanager
def serving_handler(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve by a handler class; the server's URL is yielded."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler, bind_and_activate=False)
    server.request_queue_size = 256
    server.server_bind()
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
