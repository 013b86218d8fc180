"""Presigned URLs on a real S3 server: good for one object, one way, these very bytes, once, and a short time."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import pytest

from composer_prime.errors import StoreError
from composer_prime.gateway import operations, wire
from composer_prime.gateway.wire import Ticket
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from tests.gateway.guarded import PATIENCE_S, Guarded, coded, guarding, make_run, refusal
from tests.servers.forward_proxy import forward_proxy
from tests.sync.harness import HandSite

pytestmark = pytest.mark.s3
HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class Scene:
    bucket: Store
    owner: HandSite
    gateway: Guarded
    alice: Store
    data: bytes
    key: str

    def order(self, name: str = "alice", **changes: object) -> httpx.Response:
        """Ask for a ticket to put the payload."""
        order = {
            "operation": "put",
            "nbytes": len(self.data),
            "sha256": hashlib.sha256(self.data).hexdigest(),
        } | changes
        return self.gateway.ask(name, "POST", f"{wire.TICKETS}/{self.key}", json.dumps(order).encode())

    def ticket(self) -> Ticket:
        answer = self.order()
        assert answer.status_code == 200, answer.text
        found = Ticket.from_bytes(answer.content)
        assert found.url is not None
        return found


@pytest.fixture
def scene(store_uri: Callable[[str], str]) -> Iterator[Scene]:
    with closing(open_store(store_uri("seaweed"))) as bucket:
        owner = make_run(bucket)
        payload = coded(owner)
        with guarding(bucket) as gateway, closing(gateway.store("alice", inline_bytes=0)) as alice:
            yield Scene(bucket, owner, gateway, alice, bytes(payload.data), keys.payload(0, 0, "alice", payload.sha256))


def put(ticket: Ticket, data: bytes, *, url: str | None = None, **headers: str | None) -> int:
    """The status of a PUT by a ticket; headers by name with '_' for '-', None leaves one out."""
    changed = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {name: value for name, value in (dict(ticket.headers) | changed).items() if value is not None}
    return httpx.put(
        url or str(ticket.url), content=data, headers=sent, trust_env=False, timeout=PATIENCE_S
    ).status_code


def test_a_payload_goes_straight_to_the_bucket_and_comes_straight_from_it(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scene.alice.put(scene.key, scene.data)
    assert scene.bucket.get(scene.key) == scene.alice.get(scene.key) == scene.data
    assert scene.alice.get_range(scene.key, 3, 5) == scene.data[3:8]
    moved = [line for line in scene.gateway.lines() if line["key"] == scene.key]
    assert [line["method"] for line in moved] == ["POST", "GET", "GET"]
    assert "X-Amz" not in "".join(scene.gateway.noted) and "X-Amz-Signature" not in caplog.text


def test_tickets_are_used_through_a_proxy(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with forward_proxy() as proxy:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url)
        with closing(scene.gateway.store("alice", inline_bytes=0)) as alice:
            alice.put(scene.key, scene.data)
            assert alice.get(scene.key) == scene.data and alice.get_range(scene.key, 3, 5) == scene.data[3:8]
        by_ticket = [line.split()[0] for line in proxy.passed if "X-Amz-Signature" in line]
        asked = [line for line in proxy.passed if line.split()[1].startswith(scene.gateway.root)]
    assert by_ticket == ["PUT", "GET", "GET"] and len(asked) == 4, "first contact, and three tickets"


def test_a_ticket_writes_its_bytes_once(scene: Scene) -> None:
    ticket = scene.ticket()
    assert [put(each, scene.data) for each in (ticket, ticket, scene.ticket())] == [200, 412, 412]
    for condition in (None, "x"):
        assert put(scene.ticket(), scene.data, if_none_match=condition) == 403, "its condition is signed"
    assert scene.bucket.get(scene.key) == scene.data
    scene.alice.put(scene.key, scene.data)  # the same bytes again, as after an answer that was lost


def test_a_ticket_is_for_no_other_bytes_no_other_size_and_no_other_key(scene: Scene) -> None:
    before, wrong = {key: scene.bucket.get(key) for key in scene.bucket.list("")}, bytes(len(scene.data))
    assert put(scene.ticket(), wrong) >= 400 and put(scene.ticket(), wrong, x_amz_checksum_sha256=None) == 403
    for data in (scene.data[:-1], scene.data + b"x", b""):
        assert put(scene.ticket(), data, content_length=str(len(data))) == 403
    for other in (keys.manifest(), keys.commit(0, 0), keys.beat("bob", 0), "x"):
        ticket = scene.ticket()
        url = str(ticket.url).replace(scene.key, other)
        assert url != ticket.url and put(ticket, scene.data, url=url) == 403
        assert put(ticket, scene.data, url=str(ticket.url).replace(scene.key, f"{scene.key}/%2e%2e/{other}")) >= 400
    assert {key: scene.bucket.get(key) for key in scene.bucket.list("")} == before


def test_a_ticket_is_for_no_other_method(scene: Scene) -> None:
    scene.alice.put(scene.key, scene.data)
    url = str(scene.ticket().url)
    for method in ("GET", "DELETE", "POST"):
        answer = httpx.request(
            method, url, headers=dict(scene.ticket().headers), content=scene.data, trust_env=False, timeout=PATIENCE_S
        )
        assert answer.status_code >= 400, method
    reading = scene.gateway.ask("alice", "GET", f"{wire.OBJECTS}/{scene.key}?start=0&length=9")
    url = str(Ticket.from_bytes(reading.content).url)
    assert httpx.put(url, content=b"x", trust_env=False, timeout=PATIENCE_S).status_code == 403
    assert httpx.delete(url, trust_env=False, timeout=PATIENCE_S).status_code == 403
    assert scene.bucket.get(scene.key) == scene.data


def test_a_ticket_is_for_no_other_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "EXPIRES_S", 1)
    ticket = scene.ticket()
    until = time.monotonic() + PATIENCE_S
    parts = urlsplit(str(ticket.url))
    stretched = urlunsplit(parts._replace(query=parts.query.replace("X-Amz-Expires=1", "X-Amz-Expires=9999")))
    assert put(ticket, scene.data, url=stretched) == 403
    while time.monotonic() < until and "xpired" not in put_empty(ticket):
        time.sleep(0.5)  # a ticket ends by the server's own clock
    assert put(ticket, scene.data) == 403 and not scene.bucket.list(scene.key)


def put_empty(ticket: Ticket) -> str:
    """What the bucket says to a size that the ticket isn't for."""
    headers = dict(ticket.headers) | {"content-length": "0"}
    return httpx.put(str(ticket.url), content=b"", headers=headers, trust_env=False, timeout=PATIENCE_S).text


def test_a_machine_whose_tickets_all_expired_while_it_slept_gets_new_ones_and_carries_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    waking = {"to_write": iter([HOUR]), "to_read": iter([HOUR, timedelta(), HOUR])}
    for way, ages in waking.items():
        monkeypatch.setattr(operations.Tickets, way, aged(getattr(operations.Tickets, way), ages))
    scene.alice.put(scene.key, scene.data)
    assert scene.alice.get(scene.key) == scene.data and scene.alice.get_range(scene.key, 3, 5) == scene.data[3:8]
    asked = [line["method"] for line in scene.gateway.lines() if line["key"] == scene.key]
    assert asked == ["POST", "POST", *["GET"] * 4], "a second ticket each time, and no third"


def aged(make: Callable[..., Ticket], ages: Iterator[timedelta]) -> Callable[..., Ticket]:
    """What makes tickets, as if it had been asked so long ago; when `ages` are over, now."""

    def make_aged(*args: Any, **more: Any) -> Ticket:
        at = datetime.now(UTC).replace(tzinfo=None) - next(ages, timedelta())
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("botocore.auth.get_current_datetime", lambda: at)
            return make(*args, **more)

    return make_aged


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"nbytes": 2**40}, "bytes"), ({"nbytes": 0}, "bytes"), ({"operation": "delete"}, "must be create or put")],
)
def test_no_ticket_is_given_for_what_may_not_be_written(scene: Scene, changes: dict[str, Any], words: str) -> None:
    answer = scene.order(**changes)
    assert answer.status_code in (400, 403) and words in answer.json()["error"]
    assert scene.order("bob").status_code == 403
    for key in (keys.commit(0, 0), keys.manifest(), keys.master(0, 0, "0" * 16)):
        assert "(403)" in refusal(lambda key=key: scene.alice.put(key, b"x" * 20)) or "(413)" in refusal(
            lambda key=key: scene.alice.put(key, b"x" * 20)
        )


def test_the_bucket_s_own_refusal_comes_through(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations.Tickets, "to_read", lambda self, key: Ticket(str(scene.ticket().url)))
    with pytest.raises(StoreError, match=r"the bucket says: SignatureDoesNotMatch: The .* \(403\)$"):
        scene.alice.get(scene.key)
