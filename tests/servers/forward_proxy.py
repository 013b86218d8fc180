"""A forward proxy on loopback, as companies have: it passes plain requests on, opens tunnels, and notes both."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.patience import PATIENCE_S
from tests.servers.listening import listening

PIECE_BYTES = 2**16


@dataclass
class ForwardProxy:
    """Where it listens, and what passed through it: "CONNECT host:port", or "PUT http://host:port/..."."""

    url: str = ""
    passed: list[str] = field(default_factory=list)


@contextmanager
def forward_proxy(places: Mapping[str, str] | None = None) -> Iterator[ForwardProxy]:
    """A proxy that ends with the `with`. places: where addresses are that nobody else can reach, by what is asked."""
    proxy, known = ForwardProxy(), places or {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_CONNECT(self) -> None:
            proxy.passed.append(f"CONNECT {self.path}")
            host, _, port = self.path.rpartition(":")
            self.close_connection = True
            try:
                upstream = socket.create_connection((known.get(host, host), int(port)))
            except OSError:
                self.send_response_only(502)
                self.end_headers()
                return
            with upstream:
                self.send_response_only(200)
                self.end_headers()
                back = threading.Thread(target=relay, args=(upstream, self.connection))
                back.start()
                relay(self.connection, upstream)
                back.join()

        def pass_on(self) -> None:
            proxy.passed.append(f"{self.command} {self.path}")
            to = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            host = to.hostname or ""
            upstream = HTTPConnection(known.get(host, host), to.port or 80, timeout=PATIENCE_S)
            upstream.request(self.command, f"{to.path}?{to.query}" if to.query else to.path, body, dict(self.headers))
            answer = upstream.getresponse()
            content = answer.read()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(content)
            upstream.close()

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = pass_on

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: `passed` is the log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def tls_front(port: int, certificate: str, key: str) -> Iterator[int]:
    """A port that speaks TLS with that certificate, in front of a plain one on this machine."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def answer(plain: socket.socket) -> None:
        try:
            with (
                context.wrap_socket(plain, server_side=True) as client,
                socket.create_connection(("127.0.0.1", port)) as upstream,
            ):
                back = threading.Thread(target=relay, args=(upstream, client))
                back.start()
                relay(client, upstream)
                back.join()
        except OSError:
            plain.close()  # a client that gave up, or doesn't trust us

    with listening(answer) as own_port:
        yield own_port


def relay(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until one side ends."""
    try:
        while data := source.recv(PIECE_BYTES):
            target.sendall(data)
    except OSError:
        pass
    finally:
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
