"""An S3 endpoint in front of another that answers the reading of an object as Hugging Face's does: 302, to an edge.

The front passes everything on; of an object that is read it keeps the bytes, for the edge to give to whoever comes.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from tests.servers.in_thread import serving_handler

TOLD = ("ETag", "Content-Range", "Last-Modified")


@dataclass
class Redirecting:
    """Where the front is, and what came to the edge: the headers of each request, names in small letters."""

    url: str = ""
    edge: str = ""
    came: list[dict[str, str]] = field(default_factory=list)
    loops: bool = False
    """Whether the edge redirects to itself."""
    fault: int = 0
    """The status that the edge answers with, where not 0."""
    spares_owner: bool = False
    """Whether the owner's own client gets the bytes from the front."""
    redirects_writes: bool = False
    at_home: bool = False
    """Whether the redirect leads to the front itself, where a client keeps its Authorization."""
    kept: dict[str, tuple[int, bytes, dict[str, str]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, status: int, data: bytes, headers: dict[str, str]) -> str:
        with self.lock:
            path = f"/{len(self.kept)}"
            self.kept[path] = status, data, headers
        return path if self.at_home else self.edge + path

    def sends_away(self, request: BaseHTTPRequestHandler, status: int) -> bool:
        if request.command == "PUT":
            return self.redirects_writes
        if request.command != "GET" or "list-type=2" in request.path or status not in (200, 206):
            return False
        agent = request.headers.get("User-Agent", "").lower()
        return not (self.spares_owner and ("botocore" in agent or "object_store" in agent))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Tests print nothing."""

    def answer(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else data)


@contextmanager
def redirecting(upstream: str) -> Iterator[Redirecting]:
    """A front for the S3 endpoint `upstream` with its edge, until the block ends."""
    scene, behind = Redirecting(), urlsplit(upstream)

    class Known(_Handler):
        def give(self) -> None:
            scene.came.append({name.lower(): value for name, value in self.headers.items()})
            if scene.loops:
                self.answer(302, b"", Location=self.path)
            elif scene.fault:
                self.answer(scene.fault, b"")
            else:
                status, data, headers = scene.kept[self.path]
                self.answer(status, data, **headers)

    class Front(Known):
        def pass_on(self) -> None:
            if self.path in scene.kept:
                self.give()
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            connection = HTTPConnection(behind.hostname or "", behind.port, timeout=30)
            connection.request(self.command, self.path, body, dict(self.headers))
            said = connection.getresponse()
            data = said.read()
            connection.close()
            told = {name: value for name, value in said.getheaders() if name in TOLD}
            if scene.sends_away(self, said.status):
                self.answer(302, b"", Location=scene.keep(said.status, data, told))
            else:
                self.answer(said.status, data, **told)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = pass_on

    class Edge(Known):
        do_GET = do_PUT = Known.give

    with ExitStack() as stack:
        scene.edge = stack.enter_context(serving_handler(Edge))
        scene.url = stack.enter_context(serving_handler(Front))
        yield scene
