"""A small S3 server of ours, in a thread, that fails on cue."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EMPTY_LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


class FaultyServer(ThreadingHTTPServer):
    """Just enough of S3 to store and create objects, failing on cue.

    `faults` are answered to PUTs, first to last, before any succeeds: (status, S3 error code, whether the bytes are
    kept all the same, as when the answer is lost behind the server). While `known_key` is set, requests signed with
    another access key are refused with `refusal`. `paths` are the
    paths asked for. While `is_stuck`, PUTs aren't answered.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _FaultyHandler)
        self.faults: list[tuple[int, str, bool]] = []
        self.objects: dict[str, bytes] = {}
        self.puts = 0
        self.known_key = ""
        self.refusal: tuple[int, str] = (403, "InvalidAccessKeyId")
        self.paths: list[str] = []
        self.is_stuck = threading.Event()
        self.is_over = threading.Event()


class _FaultyHandler(BaseHTTPRequestHandler):
    server: FaultyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Tests print nothing."""

    def do_GET(self) -> None:
        if self._is_refused():
            self._refuse(*self.server.refusal)
        elif "list-type=2" in self.path:
            self._answer(200, EMPTY_LISTING)
        elif self.path in self.server.objects:
            self._answer(200, self.server.objects[self.path])
        else:
            self._refuse(404, "NoSuchKey")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.puts += 1
        if self.server.is_stuck.is_set():
            self.server.is_over.wait()
        if self._is_refused():
            self._refuse(*self.server.refusal)
        elif self.server.faults:
            status, code, kept = self.server.faults.pop(0)
            if kept:
                self.server.objects.setdefault(self.path, data)
            self._refuse(status, code)
        elif self.headers.get("If-None-Match") == "*" and self.path in self.server.objects:
            self._refuse(412, "PreconditionFailed")
        else:
            self.server.objects[self.path] = data
            self._answer(200, b"")

    def _is_refused(self) -> bool:
        self.server.paths.append(self.path)
        return (
            bool(self.server.known_key) and f"Credential={self.server.known_key}/" not in self.headers["Authorization"]
        )

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>on cue</Message></Error>".encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running() -> Iterator[FaultyServer]:
    """The server on a free loopback port, until the block ends."""
    with FaultyServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.is_over.set()
            server.shutdown()
            thread.join()
