"""A stand-in for PRIME-RL's vLLM server: its routes for new weights, which remembers what it was asked in order."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.servers.in_thread import serving_handler

ROUTES = ("/pause", "/update_weights", "/resume", "/reset_prefix_cache", "/collective_rpc")


class FakeServer:
    """What was asked, and what to answer with: `statuses` by path, 200 where it names none, 404 for no route."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.statuses: dict[str, int] = {}
        self.url = ""

    def paths(self) -> list[str]:
        """The paths asked since the last time, health left out."""
        asked, self.asked = self.asked, []
        return [path for path, _ in asked]


@contextmanager
def serving_fake() -> Iterator[FakeServer]:
    """A fake on a loopback port of its own."""
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(fake.statuses.get(self.path, 200 if self.path == "/health" else 404), b"")

        def do_POST(self) -> None:
            path = self.path.partition("?")[0]
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fake.asked.append((self.path, json.loads(data) if data else None))
            self._answer(fake.statuses.get(path, 200 if path in ROUTES else 404), b'{"said": "as told"}')

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving_handler(Handler) as fake.url:
        yield fake
