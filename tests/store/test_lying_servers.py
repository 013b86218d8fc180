"""A server that sends more than it was asked for is not listened to: its bytes don't pile up in our memory."""

import gzip
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler

import pytest

from composer_prime.errors import StoreError
from composer_prime.gateway.client import Place
from composer_prime.gateway.store import GatewayStore
from composer_prime.store import open_store, remote
from composer_prime.store.base import Store
from tests.gateway.guarded import KEYS
from tests.servers.in_thread import serving_handler

MIB = 2**20
ENDLESS = 2048 * MIB
LISTING = b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'


class Liar:
    """What it has sent of one object."""

    def __init__(self) -> None:
        self.url, self.sent = "", 0


@pytest.fixture
def liar() -> Iterator[Liar]:
    found = Liar()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            is_object = self.path.endswith("key") or "objects/key" in self.path
            self.send_response(200)
            self.send_header("Content-Length", str(ENDLESS if is_object else len(LISTING)))
            self.send_header("ETag", "e")
            self.send_header("Last-Modified", "Sun, 29 Nov 2026 00:00:00 GMT")
            self.end_headers()
            if not is_object:
                self.wfile.write(LISTING)
                return
            try:
                while found.sent < ENDLESS:
                    self.wfile.write(bytes(MIB))
                    found.sent += MIB
            except OSError:
                self.close_connection = True  # nobody listens any more

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(412)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Tests print nothing."""

    with serving_handler(Handler) as found.url:
        yield found


@pytest.fixture(params=["s3", "gateway"])
def store(request: pytest.FixtureRequest, liar: Liar, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(remote, "RETRY_S", 0.0)
    if request.param == "gateway":
        opened: Store = GatewayStore(Place(liar.url, "run"), KEYS["alice"])
    else:
        monkeypatch.setenv(remote.ANONYMOUS_VARIABLE, "1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", liar.url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        opened = open_store("s3://bucket/run")
    with closing(opened):
        yield opened


def test_of_a_range_no_more_is_taken_than_was_asked_for(store: Store, liar: Liar) -> None:
    with pytest.raises(StoreError, match=r"non-partial response|more than the"):
        store.get_range("key", 0, 4 * MIB)
    assert liar.sent < 256 * MIB


def test_what_beat_a_create_is_compared_with_as_many_bytes_as_it_has(store: Store, liar: Liar) -> None:
    if isinstance(store, GatewayStore):
        pytest.skip("its gateway compares")
    with pytest.raises(StoreError, match="non-partial response"):
        store.create("key", b"a record")
    assert liar.sent < 256 * MIB


def test_an_object_at_google_that_states_a_coding_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = gzip.compress(bytes(64 * MIB))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = LISTING if "list-type=2" in self.path else bomb
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", "e")
            self.send_header("Last-Modified", "Sun, 29 Nov 2026 00:00:00 GMT")
            if data is bomb:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Tests print nothing."""

    with serving_handler(Handler) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        with closing(open_store("gs://bucket/run")) as opened:
            assert opened.get("key") == bomb
