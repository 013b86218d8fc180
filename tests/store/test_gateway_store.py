"""The client's side of a gateway: where it is, whose key, which proxy, and what it says when something is wrong."""

import http.server
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from composer_prime.errors import ConfigError, KeyMissing, StoreError, StoreUnusable
from composer_prime.gateway.client import Place
from composer_prime.gateway.store import KEY_VARIABLE, GatewayStore
from composer_prime.gateway.wire import Ticket
from composer_prime.store import keys, open_store, probe_store, remote
from composer_prime.sync.signatures import SigningKey
from tests.gateway.guarded import KEYS, guarding, make_run
from tests.servers.in_thread import serving_handler
from tests.servers.weed import free_ports


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 1.0)
    monkeypatch.setattr(remote, "FIRST_CONTACT_S", 0.5)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    KEYS["alice"].save(tmp_path / "alice.key")
    return tmp_path / "alice.key"


# --- URIs and keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "place"),
    [
        ("host/run", Place("https://host", "run")),
        ("host:8443/run-2/", Place("https://host:8443", "run-2")),
        ("gateway.example.org/base/path/run_1.x", Place("https://gateway.example.org/base/path", "run_1.x")),
        ("[::1]:80/run", Place("https://[::1]:80", "run")),
    ],
)
def test_a_uri_names_a_gateway_and_a_run(rest: str, place: Place, key_file: Path) -> None:
    with closing(open_store(f"gateway+https://{rest}", key_file)) as store:
        assert isinstance(store, GatewayStore) and store._place == place
        assert store.uri == f"gateway+https://{rest.rstrip('/')}"
        with closing(open_store(store.uri, key_file)) as again:
            assert again.uri == store.uri


@pytest.mark.parametrize(
    "rest", ["", "host", "/run", "host/Run", "host/a b", "user@host/run", "host/run?x=1", "host//run"]
)
def test_a_uri_without_a_run_is_refused_with_the_spelling(rest: str, key_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"must name a gateway and a run: write gateway\+https://host/run"):
        open_store(f"gateway+https://{rest}", key_file)


def test_the_key_comes_from_the_environment_where_none_is_given(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"set site.key_file, or {KEY_VARIABLE}"):
        open_store("gateway+https://host/run")
    monkeypatch.setenv(KEY_VARIABLE, str(key_file))
    run = open_store("memory://gateway-store-environment")
    make_run(run)
    with guarding(run) as gateway, closing(open_store(f"gateway+{gateway.root}/run")) as store:
        assert store.get(keys.manifest()) == run.get(keys.manifest())


def test_a_ticket_has_no_text_form_for_its_url() -> None:
    assert "secret" not in repr(Ticket("https://host/?X-Amz-Signature=secret"))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"url": 3, "headers": {}}', b'{"url": "file:///etc/passwd", "headers": {}}']
)
def test_what_is_no_ticket_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="ticket"):
        Ticket.from_bytes(data)


# --- a gateway that is down, busy, or says no ------------------------------------------------------------------------


def test_a_gateway_that_is_down_is_retried_and_then_said_to_be(key_file: Path) -> None:
    (port,) = free_ports(1)
    with (
        closing(open_store(f"gateway+http://127.0.0.1:{port}/run", key_file)) as store,
        pytest.raises(StoreUnusable, match=rf"no sound answer from http://127.0.0.1:{port} .*ask the run's owner"),
    ):
        probe_store(store)


def test_who_isn_t_admitted_hears_the_gateway_s_own_words_at_once() -> None:
    run = open_store("memory://gateway-store-stranger")
    make_run(run)
    stranger = SigningKey.generate()
    with guarding(run) as gateway:
        store = GatewayStore(Place(gateway.root, "run"), stranger)
        with pytest.raises(StoreUnusable, match=r"the gateway says: run run admits no site with the key .*\(401\)"):
            probe_store(store)
        store.close()
        other = GatewayStore(Place(gateway.root, "run-2"), KEYS["alice"])
        with pytest.raises(StoreUnusable, match=r"serves run run, not 'run-2'"):
            other.get(keys.manifest())
        other.close()
        assert len(gateway.lines()) == 2, "what lasts isn't tried again"


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers `/run/site` well, and the rest from a list, first to last: (status, headers, JSON)."""

    protocol_version = "HTTP/1.1"
    script: ClassVar[list[tuple[int, dict[str, str], Any]]]
    asked: ClassVar[list[str]]

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append(f"{self.command} {self.path}")
        status, headers, body = (200, {}, {}) if self.path.endswith("/run/site") else self.script.pop(0)
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", "content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def scripted() -> Iterator[tuple[GatewayStore, type[Scripted]]]:
    class Handler(Scripted):
        script: ClassVar[list[tuple[int, dict[str, str], Any]]] = []
        asked: ClassVar[list[str]] = []

    with serving_handler(Handler) as url, closing(GatewayStore(Place(url, "run"), KEYS["alice"])) as store:
        yield store, Handler


def test_a_busy_gateway_is_obeyed_and_asked_again(scripted: tuple[GatewayStore, type[Scripted]]) -> None:
    store, handler = scripted
    busy = {"error": "busy", "code": "busy"}
    handler.script += [(429, {"retry-after": "1"}, busy), (503, {}, busy), (200, {}, {"keys": ["b", "a", "../x"]})]
    began = time.monotonic()
    assert store.list("") == ["a", "b"]
    assert time.monotonic() - began >= 1 and not handler.script


def test_a_gateway_that_fails_for_good_is_a_store_error(scripted: tuple[GatewayStore, type[Scripted]]) -> None:
    store, handler = scripted
    handler.script += [(502, {}, {"error": "the bucket behind the gateway failed: StoreError", "code": "bucket"})] * 50
    with pytest.raises(StoreError, match=r"list of rounds/ .*the bucket behind the gateway failed.* \(502\)") as failed:
        store.list("rounds/")
    assert not isinstance(failed.value, StoreUnusable)
    assert 1 < handler.asked.count("GET /run/keys?prefix=rounds/") < 50


@pytest.mark.parametrize("status", [400, 403, 405, 413])
def test_a_refusal_comes_through_in_the_gateway_s_words_and_is_final(
    scripted: tuple[GatewayStore, type[Scripted]], status: int
) -> None:
    store, handler = scripted
    handler.script += [(status, {}, {"error": "no such thing: do another", "code": "x"})]
    with pytest.raises(StoreError, match=rf"delete of a .* the gateway says: no such thing: do another \({status}\)"):
        store.delete("a")
    assert len(handler.asked) == 2


def test_a_proxy_s_own_page_is_no_missing_key(scripted: tuple[GatewayStore, type[Scripted]]) -> None:
    store, handler = scripted
    handler.script += [(404, {}, "<html>not here</html>"), (404, {}, {"error": "no object", "code": "missing"})]
    with pytest.raises(StoreError, match="not here") as failed:
        store.get("a")
    assert not isinstance(failed.value, KeyMissing)
    with pytest.raises(KeyMissing, match="no object at a in gateway"):
        store.get("a")


def test_a_put_that_meets_other_bytes_where_things_are_written_once_says_so(
    scripted: tuple[GatewayStore, type[Scripted]],
) -> None:
    store, handler = scripted
    handler.script += [(200, {}, {"stands": False}), (200, {"content-type": "application/octet-stream"}, "others")]
    with pytest.raises(StoreError, match="other bytes stand there, and it is written once"):
        store.put("a", b"x")


def test_a_proxy_from_the_environment_is_used(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Proxy(Scripted):
        script: ClassVar[list[tuple[int, dict[str, str], Any]]] = [(200, {}, {"keys": ["a"]})]
        asked: ClassVar[list[str]] = []

    with serving_handler(Proxy) as url:
        monkeypatch.setenv("HTTP_PROXY", url)
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        with closing(open_store("gateway+http://gateway.invalid/run", key_file)) as store:
            assert store.list("") == ["a"]
    assert Proxy.asked == ["GET http://gateway.invalid/run/site", "GET http://gateway.invalid/run/keys?prefix="]
