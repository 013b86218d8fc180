"""A small S3 server of ours, in a thread, that fails on cue."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

EMPTY_LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


class FaultyServer(ThreadingHTTPServer):
    """Just enough of S3 to store and create objects, in parts too, failing on cue.

    `faults` are answered to PUTs, first to last, before any succeeds: (status, S3 error code, whether the bytes are
    kept all the same, as when the answer is lost behind the server). While `known_key` is set, requests signed with
    another access key are refused with `refusal`. `paths` are the paths asked for. While `is_stuck`, PUTs aren't
    answered. The next `torn_gets` reads of objects are cut: half of the bytes come, then the connection ends. The next
    `torn_puts` are reset in the middle of their bytes. `get_faults` are answered to reads: (status, code, words).
    `signed` are the requests' signatures. `visit` is called in every GET and PUT of an object.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _FaultyHandler)
        self.faults: list[tuple[int, str, bool]] = []
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.get_faults: list[tuple[int, str, str]] = []
        self.signed: list[str] = []
        self.puts = 0
        self.gets = 0
        self.torn_gets = 0
        self.torn_puts = 0
        self.visit: Callable[[], None] = lambda: None
        self.known_key = ""
        self.refusal: tuple[int, str] = (403, "InvalidAccessKeyId")
        self.paths: list[str] = []
        self.is_stuck = threading.Event()
        self.is_over = threading.Event()
        self.changed = threading.Condition()
        self.num_connections = 0

    def takes(self, name: str) -> bool:
        """Whether one of the faults counted in `name` is left; it is used up."""
        with self.changed:
            left = getattr(self, name)
            setattr(self, name, max(left - 1, 0))
            return left > 0

    def connected(self, number: int) -> None:
        """So many connections more are open."""
        with self.changed:
            self.num_connections += number
            self.changed.notify_all()


class _FaultyHandler(BaseHTTPRequestHandler):
    server: FaultyServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.connected(1)

    def finish(self) -> None:
        super().finish()
        self.server.connected(-1)

    def log_message(self, format: str, *args: object) -> None:
        """Tests print nothing."""

    def do_GET(self) -> None:
        if self._is_refused():
            self._refuse(*self.server.refusal)
        elif "list-type=2" in self.path:
            self._answer(200, EMPTY_LISTING)
        elif self.server.get_faults:
            self._refuse(*self.server.get_faults.pop(0))
        elif self.path in self.server.objects:
            self.server.gets += 1
            self.server.visit()
            first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            whole = self.server.objects[self.path]
            body = whole[int(first) : int(last) + 1] if last else whole
            place = f"bytes {first}-{int(first) + len(body) - 1}/{len(whole)}" if last else ""
            if last and not body:
                self._refuse(416, "InvalidRange")
            else:
                self._answer(206 if last else 200, body, place, torn=self.server.takes("torn_gets"))
        else:
            self._refuse(404, "NoSuchKey")

    def do_PUT(self) -> None:
        num_bytes = int(self.headers["Content-Length"])
        self.server.puts += 1
        if self.server.takes("torn_puts"):
            self.rfile.read(num_bytes // 2)
            self._reset()
            return
        data = self.rfile.read(num_bytes)
        self.server.visit()
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
        elif "?" in self.path:
            query = self._query()
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = data
            self._answer(200, b"")
        else:
            self.server.objects[self.path] = data
            self._answer(200, b"")

    def do_POST(self) -> None:
        """Begin an upload in parts, or put its parts together."""
        self.rfile.read(int(self.headers["Content-Length"]))
        query = self._query()
        if "uploads" in query:
            upload = f"upload-{len(self.server.paths)}"
            self.server.uploads[upload] = {}
            self.server.paths.append(self.path)
            self._answer(200, f"<Begun><UploadId>{upload}</UploadId></Begun>".encode())
        else:
            parts = self.server.uploads.pop(query["uploadId"])
            self.server.objects[self.path.partition("?")[0]] = b"".join(parts[number] for number in sorted(parts))
            self._answer(200, b"<CompleteMultipartUploadResult><ETag>etag</ETag></CompleteMultipartUploadResult>")

    def do_DELETE(self) -> None:
        """Drop an upload's parts."""
        del self.server.uploads[self._query()["uploadId"]]
        self._answer(204, b"")

    def _query(self) -> dict[str, str]:
        found = parse_qs(self.path.partition("?")[2], keep_blank_values=True)
        return {name: values[0] for name, values in found.items()}

    def _is_refused(self) -> bool:
        self.server.paths.append(self.path)
        self.server.signed.append(self.headers.get("Authorization", ""))
        known = self.server.known_key
        return bool(known) and f"Credential={known}/" not in self.server.signed[-1]

    def _refuse(self, status: int, code: str, words: str = "on cue") -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{words}</Message></Error>".encode())

    def _answer(self, status: int, body: bytes, place: str = "", *, torn: bool = False) -> None:
        self.send_response(status)
        if place:
            self.send_header("Content-Range", place)
        self.send_header("Last-Modified", "Sun, 29 Nov 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"etag"')
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if torn else body)
        self.close_connection = self.close_connection or torn

    def _reset(self) -> None:
        """End the connection as a host that is lost does: the other side is told so, and bytes under way are gone."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()  # else the socket stays open for its sake
        self.connection.close()
        self.close_connection = True


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
