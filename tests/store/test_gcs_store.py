"""Google's store: bytes that look like a request's end, failures that pass, credentials, and the missing package."""

import json
import socket
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from composer_prime.errors import KeyMissing, StoreError, StoreUnusable
from composer_prime.store import Store, open_store, probe_store, remote, retry
from tests.patience import PATIENCE_S
from tests.servers.forward_proxy import ForwardProxy, forward_proxy

pytest.importorskip("gcsfs", reason="needs the extra: pip install -e '.[gcs]'")

REPOSITORY = Path(__file__).parents[2]
DELIMITERS = b"\r\n--==0==--\r\n--\n--==0==\n"


class CuedServer(ThreadingHTTPServer):
    """Answers each request with the next of `answers`, then with an empty listing.

    An answer is a status and a message, or a status below 400 and what to answer as JSON. The next `num_torn` objects
    that are read are cut: half of the bytes come, then the connection ends.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CuedHandler)
        self.answers: list[tuple[int, Any]] = []
        self.requests: list[str] = []
        self.to_proxies: list[str | None] = []
        self.num_torn = 0


class _CuedHandler(BaseHTTPRequestHandler):
    server: CuedServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Tests print nothing."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{self.command} {self.path}")
        self.server.to_proxies.append(self.headers.get("Proxy-Authorization"))
        status, content = self.server.answers.pop(0) if self.server.answers else (200, {})
        body = json.dumps({"error": {"message": content}} if status >= 400 else content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        is_torn = "alt=media" in self.path and self.server.num_torn > 0
        self.server.num_torn -= is_torn
        self.wfile.write(body[: len(body) // 2] if is_torn else body)
        self.close_connection = self.close_connection or is_torn

    do_POST = do_DELETE = do_CONNECT = do_GET


@pytest.fixture
def cued(monkeypatch: pytest.MonkeyPatch) -> Iterator[CuedServer]:
    with CuedServer() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def cued_store(cued: CuedServer) -> Iterator[Store]:
    with closing(open_store("gs://bucket/run")) as store:
        store.list("")  # first contact
        cued.requests.clear()
        yield store


@pytest.mark.s3
def test_bytes_that_look_like_the_end_of_a_request_come_back_whole(store_uri: Callable[[str], str]) -> None:
    with closing(open_store(store_uri("gcs"))) as store:
        assert store.create("created", DELIMITERS) and store.get("created") == DELIMITERS
        store.put("put", DELIMITERS)
        assert store.get("put") == DELIMITERS


@pytest.mark.s3
def test_listing_of_more_than_a_page_is_complete(store_uri: Callable[[str], str]) -> None:
    keys = [f"tape/a/{number:08d}.jsonl" for number in range(1_005)]
    with closing(open_store(store_uri("gcs"))) as store, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
        assert store.list("tape/") == keys


def test_pages_are_followed_by_their_tokens(cued: CuedServer, cued_store: Store) -> None:
    cued.answers = [
        (200, {"items": [{"name": "run/tape/b"}], "nextPageToken": "b&more"}),
        (503, "busy"),
        (200, {"nextPageToken": "empty pages exist"}),
        (200, {"items": [{"name": "run/tape/a"}]}),
    ]
    assert cued_store.list("tape/") == ["tape/a", "tape/b"]
    asked = [parse_qs(urlsplit(request).query) for request in cued.requests]
    assert [query.get("pageToken") for query in asked] == [None, ["b&more"], ["b&more"], ["empty pages exist"]]
    assert all(query["prefix"] == ["run/tape/"] for query in asked)


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_failures_that_pass_are_outlived(status: int, cued: CuedServer, cued_store: Store) -> None:
    cued.answers = [(status, "on cue")] * 2
    cued_store.put("k", b"")
    assert len(cued.requests) == 3


def test_winner_gone_at_the_read_back_is_tried_again(cued: CuedServer, cued_store: Store) -> None:
    cued.answers = [(412, "conditionNotMet"), (404, "gone")]
    assert cued_store.create("k", b"mine") is True
    assert ["ifGenerationMatch=0" in request for request in cued.requests] == [True, False, True]


def test_failure_that_lasts_is_a_store_error_with_its_cause(
    cued: CuedServer, cued_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    cued.answers = [(400, "no such thing")]
    with pytest.raises(StoreError, match=r"put of k in gs://bucket/run failed: no such thing \(400\)"):
        cued_store.put("k", b"")
    monkeypatch.setattr(retry, "RETRY_S", 0.3)
    cued.answers = [(503, "busy")] * 100
    with pytest.raises(StoreError, match=r"busy \(503\)") as raised:
        cued_store.get("k")
    assert not isinstance(raised.value, StoreUnusable | KeyMissing)


def test_a_read_that_is_cut_is_tried_again_until_all_bytes_are_there(cued: CuedServer, cued_store: Store) -> None:
    cued.answers, cued.num_torn = [(200, {"bytes": "0123456789"})] * 3, 2
    assert json.loads(cued_store.get("k")) == {"bytes": "0123456789"}
    assert len(cued.requests) == 3


def test_a_read_that_is_always_cut_is_a_store_error_and_never_short_bytes(
    cued: CuedServer, cued_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.3)
    cued.answers, cued.num_torn = [(200, "0123456789")] * 100, 100
    with pytest.raises(StoreError, match=r"get of k in gs://bucket/run failed: no sound answer .*: check") as raised:
        cued_store.get("k")
    assert not isinstance(raised.value, StoreUnusable | KeyMissing)
    assert len(cued.requests) > 1


@pytest.mark.parametrize("status", [401, 403])
def test_credentials_that_expire_are_a_store_error_and_are_read_again(
    status: int, cued: CuedServer, cued_store: Store
) -> None:
    cued.answers = [(status, "Invalid Credentials")]
    cued_store.put("k", b"")
    cued.answers = [(status, "Invalid Credentials")] * 2
    with pytest.raises(StoreError, match=rf"Invalid Credentials \({status}\): renew the credentials") as raised:
        cued_store.put("k", b"")
    assert not isinstance(raised.value, StoreUnusable)
    cued_store.put("k", b"")


def test_refusal_and_missing_bucket_at_first_contact_are_unusable(cued: CuedServer) -> None:
    for answer, remedy in (((403, "no"), "GOOGLE_APPLICATION_CREDENTIALS"), ((404, "no"), "there is no bucket bucket")):
        cued.answers = [answer]
        with closing(open_store("gs://bucket")) as store, pytest.raises(StoreUnusable, match=remedy):
            probe_store(store)


def test_key_file_that_is_absent_is_named_as_missing_credentials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    with closing(open_store("gs://bucket")) as store, pytest.raises(StoreUnusable, match="gcloud auth") as raised:
        probe_store(store)
    assert "absent.json was not found" in str(raised.value)


def test_endpoint_where_nothing_listens_is_unusable_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_CONTACT_S", 0.5)
    with socket.socket() as unheard:  # bound, so that nobody else takes the port, but not listening
        unheard.bind(("127.0.0.1", 0))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{unheard.getsockname()[1]}")
        with closing(open_store("gs://bucket")) as store, pytest.raises(StoreUnusable, match="no sound answer from"):
            probe_store(store)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForwardProxy]:
    """What the environment names for all but this machine; it alone knows where bucket.invalid is."""
    for name in ("NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with forward_proxy({"bucket.invalid": "127.0.0.1"}) as running:
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, running.url)
        yield running


def test_a_proxy_from_the_environment_is_used(
    cued: CuedServer, proxy: ForwardProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"bucket.invalid:{cued.server_port}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{place}")
    with closing(open_store("gs://bucket/run")) as store:
        store.put("k", b"bytes")
        assert store.list("") == []
    assert [line.split()[0] for line in proxy.passed] == ["GET", "POST", "GET"], "first contact, put, list"
    assert all(f" http://{place}/" in line for line in proxy.passed)


def test_https_goes_through_a_tunnel_of_the_proxy(
    cued: CuedServer, proxy: ForwardProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_CONTACT_S", 0.1)
    place = f"bucket.invalid:{cued.server_port}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"https://{place}")
    with closing(open_store("gs://bucket/run")) as store, pytest.raises(StoreUnusable, match="no sound answer"):
        store.list("")  # the server at the tunnel's end speaks no TLS
    assert set(proxy.passed) == {f"CONNECT {place}"}


@pytest.mark.usefixtures("proxy")
def test_a_proxy_gets_its_password_and_nobody_else_is_told_it(
    cued: CuedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_CONTACT_S", 0.1)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "https://bucket.invalid")
    monkeypatch.setenv("https_proxy", f"http://alice:pass%2Bword@127.0.0.1:{cued.server_port}")
    cued.answers = [(502, "no tunnels today")] * 9
    with closing(open_store("gs://bucket/run")) as store, pytest.raises(StoreUnusable, match="502") as refused:
        store.list("")
    assert "word" not in str(refused.value)
    assert set(cued.requests) == {"CONNECT bucket.invalid:443"}
    assert set(cued.to_proxies) == {f"Basic {b64encode(b'alice:pass+word').decode()}"}


def test_missing_package_names_the_extra_to_install() -> None:
    code = """if True:
        import sys
        sys.modules["gcsfs"] = None
        from composer_prime.errors import ConfigError
        from composer_prime.store import open_store
        try:
            open_store("gs://bucket/run")
        except ConfigError as error:
            print(error)
        assert "torch" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert "pip install -e '.[gcs]'" in done.stdout
