"""What one member can cost the others: bodies that never end, long listings, large spans, deep JSON; all is logged."""

import asyncio
import http.client
import io
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from composer_prime.errors import BadInput
from composer_prime.gateway import app, served
from composer_prime.gateway.audit import Audit
from composer_prime.gateway.identity import Identities
from composer_prime.gateway.limits import Rate, Rates, TokenBucket
from composer_prime.gateway.served import serve_run
from composer_prime.gateway.serving import gateway_app
from composer_prime.store import gateway_wire as wire
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex
from tests.gateway.guarded import (
    FAST,
    KEYS,
    MAX_OBJECT_BYTES,
    PATIENCE_S,
    RUN,
    AnyKey,
    Guarded,
    coded,
    guarding,
    make_run,
    offer_of,
    signed,
    tape_key,
)

CLAIM = f"objects/{keys.claim('alice', 0)}?operation=create"
WAIT_S = 600


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def head(name: str, method: str, target: str, **more: str) -> bytes:
    """A signed request up to the end of its headers."""
    signer = wire.Signer(KEYS[name].public, KEYS[name].sign)
    headers = wire.signed_headers(
        signer, method, RUN, target, "0" * 64, time_s=int(time.time()), nonce=secrets.token_hex(12)
    )
    lines = [f"{method} /{RUN}/{target} HTTP/1.1", "host: x", *(f"{key}: {text}" for key, text in headers.items())]
    lines += [f"{key.replace('_', '-')}: {text}" for key, text in more.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@contextmanager
def stalled(gateway: Guarded, name: str, target: str = CLAIM, num_bytes: int = 1000) -> Iterator[socket.socket]:
    """A connection on which a request's body has begun and doesn't go on."""
    with closing(socket.create_connection(("127.0.0.1", gateway.port), timeout=WAIT_S)) as connection:
        connection.sendall(head(name, "PUT", target, content_length=str(num_bytes)) + b"x")
        yield connection


def status_of(connection: socket.socket) -> int:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status


def test_one_site_s_open_requests_are_bounded_and_don_t_lock_others_out(
    gateway: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SITE_UNDER_WAY", 3)
    monkeypatch.setattr(app, "UNDER_WAY", 12)
    with ExitStack() as stack:
        tried = [stack.enter_context(stalled(gateway, "alice")) for _ in range(12)]
        wait_until(lambda: len(gateway.lines()) >= 9)
        refused = gateway.lines()
        assert {(line["site"], line["status"]) for line in refused} == {("alice", 429)}
        assert all("has 3 requests under way" in line["why"] for line in refused) and len(tried) - len(refused) == 3
        assert gateway.ask("bob", "GET", "site").status_code == 200
        assert gateway.ask("alice", "GET", "site").status_code == 429
    wait_until(lambda: gateway.ask("alice", "GET", "site").status_code == 200)


def test_a_body_that_doesn_t_come_ends_in_time_for_its_size(gateway: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_PATIENCE_S", 0.2)
    monkeypatch.setattr(app, "BODY_BYTES_PER_S", 2000)
    with stalled(gateway, "alice", num_bytes=1000) as connection:
        assert status_of(connection) == 408
    (line,) = gateway.lines()
    assert (line["site"], line["status"], line["verdict"]) == ("alice", 408, "refused")
    assert "body has not come within 1 s" in line["why"]


def test_who_hangs_up_within_its_request_is_in_the_audit_log(gateway: Guarded) -> None:
    with stalled(gateway, "alice"):
        pass
    wait_until(gateway.lines)
    (line,) = gateway.lines()
    assert (line["site"], line["status"], line["key"]) == ("alice", 499, keys.claim("alice", 0))
    assert "hung up" in line["why"]


def test_a_request_at_which_the_gateway_itself_fails_is_in_the_audit_log(
    gateway: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> str:
        raise MemoryError

    monkeypatch.setattr(Identities, "site_of", fail)
    assert gateway.ask("alice", "GET", "site").status_code == 500
    (line,) = gateway.lines()
    assert (line["status"], line["verdict"]) == (500, "failed")


def test_who_still_waits_when_the_gateway_ends_is_told_to_come_again_and_it_is_in_the_audit_log(
    gateway: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*args: object) -> None:
        await asyncio.Event().wait()

    log = io.StringIO()
    transport = httpx.ASGITransport(gateway_app(gateway.served, Audit(log), FAST))
    monkeypatch.setattr(app.Gateway, "_do", never)

    async def asked_in_vain() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            asking = asyncio.ensure_future(client.get(f"/{RUN}/site"))
            await asyncio.sleep(0.1)
            asking.cancel()  # as uvicorn does with what is under way after its grace
            return await asking

    answer = asyncio.run(asked_in_vain())
    assert answer.status_code == 503 and "ask again" in answer.text
    assert [json.loads(line)["status"] for line in log.getvalue().splitlines()] == [503]


@pytest.mark.parametrize("deep", [b"[" * 200_000, b'{"a":' * 50_000, b"[" * 900 + b"]" * 900])
def test_deep_json_is_refused_like_any_other_that_is_wrong(gateway: Guarded, deep: bytes) -> None:
    tape = gateway.ask("alice", "PUT", f"objects/{tape_key('alice', deep)}?operation=create", deep)
    assert tape.status_code == 403 and "is no tape" in tape.text
    order = gateway.ask("alice", "POST", f"tickets/{tape_key('alice', deep)}", deep[:1000])
    assert order.status_code == 400
    assert [line["status"] for line in gateway.lines()] == [403, 400]


def test_a_stranger_s_long_operation_doesn_t_fill_the_log(gateway: Guarded) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    with closing(connection):
        connection.request("PUT", f"/{RUN}/objects/x?operation={'A' * 60_000}")
        assert connection.getresponse().status == 401
    (line,) = gateway.lines()
    assert line["operation"] == "A" * 512 and len(gateway.log.getvalue()) < 2000


def test_a_span_is_no_longer_than_an_answer(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    make_run(store)
    with guarding(store) as gateway:
        target = f"objects/{keys.manifest()}?start=0&length="
        answer = gateway.ask("alice", "GET", f"{target}{10**17}")
        assert answer.status_code == 413 and f"at most {wire.SPAN_BYTES} go through" in answer.text
        assert gateway.ask("alice", "GET", f"{target}{wire.SPAN_BYTES}").content == store.get(keys.manifest())
        assert [line["status"] for line in gateway.lines()] == [413, 200]


def test_an_object_larger_than_an_answer_comes_in_spans(store: Store) -> None:
    make_run(store)
    data = secrets.token_bytes(2 * wire.SPAN_BYTES + 5)
    store.put("large", data)
    with guarding(store, rules=AnyKey()) as gateway, closing(gateway.store("alice")) as alice:
        assert gateway.ask("alice", "GET", "objects/large").status_code == 413
        assert alice.get("large") == data
        assert alice.get_range("large", 3, len(data)) == data[3:]
        assert alice.get_range("large", 7, wire.SPAN_BYTES + 1) == data[7 : 8 + wire.SPAN_BYTES]
        read = [line["nbytes"] for line in gateway.lines() if line["operation"] == "GET"]
    assert max(read) == wire.SPAN_BYTES


def test_the_size_that_a_kind_may_have_is_asked_before_its_body_is_read(gateway: Guarded) -> None:
    target = f"objects/{keys.beat('alice', 0)}?operation=put"
    with stalled(gateway, "alice", target, num_bytes=2**20) as connection:
        assert status_of(connection) == 403
    (line,) = gateway.lines()
    assert "a beat at most 65536" in line["why"]


def test_who_sends_an_object_says_how_long_it_is(gateway: Guarded) -> None:
    with closing(socket.create_connection(("127.0.0.1", gateway.port), timeout=WAIT_S)) as connection:
        connection.sendall(head("alice", "PUT", CLAIM, transfer_encoding="chunked") + b"1\r\nx\r\n")
        assert status_of(connection) == 411


def test_payloads_that_can_t_go_through_the_gateway_are_found_at_the_start(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(store)
    monkeypatch.setattr(served, "MAX_CREATE_BYTES", 16)
    with pytest.raises(BadInput, match=r"have up to \d+ bytes, and memory://.* takes 16: use an S3 bucket"):
        serve_run(store, MAX_OBJECT_BYTES)


def test_signatures_beyond_the_rate_aren_t_remembered(store: Store) -> None:
    make_run(store)
    with guarding(store, rates=Rates(site=Rate(0.001, 2), gateway=FAST.gateway)) as gateway:
        remembered = _seen_of(gateway)
        answers = [gateway.ask("alice", "PUT", CLAIM, b"{}").status_code for _ in range(6)]
    assert answers == [403, 403, 429, 429, 429, 429] and len(remembered()) == 2


def _seen_of(gateway: Guarded) -> Callable[[], Any]:
    """The signatures that the gateway remembers: found by what holds its roster."""
    import gc

    (identities,) = [
        found for found in gc.get_objects() if type(found) is Identities and found._roster is gateway.served.roster
    ]
    return lambda: identities._seen


def test_long_listings_count_as_several_requests(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(store)
    for number in range(2500):
        store.put(keys.tape("bob", number, sha256_hex(b"{}\n")), b"{}\n")
    with guarding(store, rates=Rates(site=Rate(0.001, 5), gateway=FAST.gateway)) as gateway:
        codes = [gateway.ask("alice", "GET", f"keys?prefix={keys.tape_prefix('bob')}").status_code for _ in range(3)]
    assert codes == [200, 200, 429], "each costs three of five"


def test_a_debt_is_at_most_a_bucket() -> None:
    now = [0.0]
    bucket = TokenBucket(Rate(1, 10), lambda: now[0])
    bucket.owe(1000)
    assert bucket.take() == 11
    now[0] = 11
    assert bucket.take() == 0


def test_unsound_offers_are_charged(store: Store) -> None:
    run = make_run(store)
    rates = Rates(site=FAST.site, gateway=FAST.gateway, record_bytes=Rate(0.001, 2000))
    with guarding(store, rates=rates) as gateway:
        data = signed(gateway.served, "alice", offer_of(run, "alice", coded(run)))
        target = f"objects/{keys.offer(0, 0, 'alice')}?operation=create"
        codes = [gateway.ask("alice", "PUT", target, data).status_code for _ in range(2 + 2000 // len(data))]
    assert codes == [403] * (2000 // len(data)) + [429] * 2
