"""Who is let in: signatures over every part of a request, times, replays, other runs, revoked keys, paths, floods."""

import io
import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import pytest

from composer_prime.errors import SiteRevoked, StoreError, StoreUnusable
from composer_prime.gateway.audit import Audit, Entry
from composer_prime.gateway.identity import Identities
from composer_prime.gateway.identity import Signed as SignedRequest
from composer_prime.gateway.limits import Rate, Rates
from composer_prime.gateway.refusal import Refusal
from composer_prime.store import gateway_wire as wire
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.owner import Owner
from tests.gateway.guarded import (
    FAST,
    KEYS,
    OWNER,
    PATIENCE_S,
    RUN,
    Guarded,
    beat_of,
    claim_of,
    guarding,
    make_run,
    signed,
)

CLAIM = f"objects/{keys.claim('alice', 0)}?operation=create"


def claim(gateway: Guarded, name: str = "alice", incarnation: int = 0) -> bytes:
    return signed(gateway.served, name, claim_of(name, incarnation))


def said(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]


def test_a_sound_request_is_answered(gateway: Guarded) -> None:
    assert gateway.ask("alice", "GET", "site").json() == {"site": "alice", "run": RUN}
    assert gateway.ask("alice", "PUT", CLAIM, claim(gateway)).json() == {"stands": True}


def test_health_asks_for_no_signature(gateway: Guarded) -> None:
    assert httpx.get(f"{gateway.root}/health", trust_env=False, timeout=PATIENCE_S).json() == {
        "status": "ready",
        "run": RUN,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"signed_as": f"objects/{keys.claim('alice', 1)}?operation=create"},
        {"signed_as": CLAIM.replace("create", "put")},
        {"signed_method": "GET"},
        {"run": "run-2", "sent_run": RUN},
        {"headers": {wire.KEY_HEADER: KEYS["bob"].public}},
        {"headers": {wire.NONCE_HEADER: "0" * 24}},
        {"headers": {wire.TIME_HEADER: "a second later"}},
        {"headers": {wire.SIGNATURE_HEADER: "A" * 86 + "=="}},
        {"headers": {wire.SIGNATURE_HEADER: "not base64"}},
    ],
    ids=[
        "another key",
        "another operation",
        "another method",
        "another run",
        "another site",
        "nonce",
        "time",
        "zeros",
        "junk",
    ],
)
def test_a_signature_over_anything_else_is_refused(gateway: Guarded, store: Store, changes: dict[str, Any]) -> None:
    if wire.TIME_HEADER in changes.get("headers", {}):
        now = int(time.time())
        changes = {"time_s": now, "headers": {wire.TIME_HEADER: str(now + 1)}}
    status, words = said(gateway.ask("alice", "PUT", CLAIM, claim(gateway), **changes))
    assert status == 401 and "signature isn't one of" in words
    assert not store.list(keys.site_prefix("alice"))


def test_a_signature_over_another_body_is_refused(gateway: Guarded, store: Store) -> None:
    body = claim(gateway)
    status, words = said(gateway.ask("alice", "PUT", CLAIM, body, signed_body=body + b" "))
    assert status == 401 and "body isn't the one that was signed" in words
    assert not store.list(keys.site_prefix("alice"))


@pytest.mark.parametrize("header", [wire.KEY_HEADER, wire.TIME_HEADER, wire.BODY_HEADER, wire.SIGNATURE_HEADER])
def test_an_unsigned_request_is_refused_by_name_of_what_lacks(gateway: Guarded, header: str) -> None:
    status, words = said(gateway.ask("alice", "GET", "keys?prefix=", headers={header: ""}))
    assert status == 401 and f"isn't signed, it has no {header}" in words


@pytest.mark.parametrize(("off_s", "way"), [(-400, "behind"), (400, "ahead of")])
def test_an_expired_or_early_request_hears_how_far_its_clock_is_off(gateway: Guarded, off_s: int, way: str) -> None:
    status, words = said(gateway.ask("alice", "GET", "site", time_s=int(time.time()) + off_s))
    assert (
        status == 401 and f"s {way} the gateway's clock, at most 300 s" in words and "set this machine's clock" in words
    )
    off = re.search(r"time is (\d+) s", words)
    assert off is not None and 340 < int(off[1]) < 460  # a busy machine may take a while to send and answer


def test_a_kept_write_can_t_be_sent_again(gateway: Guarded, store: Store) -> None:
    fixed = {"time_s": int(time.time()), "nonce": "1" * 24}
    first = signed(gateway.served, "alice", beat_of("alice", counter=1))
    target = f"objects/{keys.beat('alice', 0)}?operation=put"
    assert gateway.ask("alice", "PUT", target, first, **fixed).status_code == 200
    assert said(gateway.ask("alice", "PUT", target, first, **fixed))[0] == 401
    assert "was sent before" in said(gateway.ask("alice", "PUT", target, first, **fixed))[1]


def test_a_write_replayed_to_another_gateway_changes_nothing(gateway: Guarded, store: Store) -> None:
    fixed = {"time_s": int(time.time()), "nonce": "1" * 24}
    old, new = (signed(gateway.served, "alice", beat_of("alice", counter=n)) for n in (1, 2))
    target = f"objects/{keys.beat('alice', 0)}?operation=put"
    assert gateway.ask("alice", "PUT", target, old, **fixed).status_code == 200
    assert gateway.ask("alice", "PUT", target, new).status_code == 200
    with guarding(store) as second:
        status, words = said(second.ask("alice", "PUT", target, old, **fixed))
    assert status == 403 and "an old one, sent again" in words
    assert store.get(keys.beat("alice", 0)) == new


def test_remembered_signatures_are_forgotten_when_their_time_is_over(store: Store) -> None:
    run, now = make_run(store), [1000.0]
    identities = Identities(run.roster, RUN, clock=lambda: now[0], wall=lambda: now[0])
    signer = wire.Signer(KEYS["alice"].public, KEYS["alice"].sign)

    def ask() -> str:
        headers = wire.signed_headers(signer, "PUT", RUN, "x", wire.body_sha256(b""), time_s=1000, nonce="n")
        return identities.site_of(SignedRequest("PUT", "x", headers))

    assert ask() == "alice"
    with pytest.raises(Refusal, match="sent before"):
        ask()
    now[0] += 601
    with pytest.raises(Refusal, match="601 s behind"):
        ask()


def test_another_run_is_not_served(gateway: Guarded) -> None:
    status, words = said(gateway.ask("alice", "GET", "keys?prefix=", run="run-2"))
    assert status == 404 and "serves run run, not 'run-2'" in words


def test_a_stranger_s_key_is_refused_with_the_way_in(gateway: Guarded) -> None:
    status, words = said(gateway.ask("mallory", "GET", "site"))
    assert status == 401 and KEYS["mallory"].public in words and "ask its owner to admit it" in words


def test_a_revoked_key_is_refused_within_seconds_and_an_admitted_one_let_in(gateway: Guarded, store: Store) -> None:
    assert gateway.ask("bob", "GET", "site").status_code == 200
    Owner(store, OWNER).revoke("bob")
    Owner(store, OWNER).admit("mallory", KEYS["mallory"].public, guest=True)
    deadline = time.monotonic() + 600
    while gateway.ask("bob", "GET", "site").status_code == 200:
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)
    assert said(gateway.ask("bob", "GET", "site")) == (401, str(SiteRevoked.of("bob")))
    assert gateway.ask("mallory", "GET", "site").json()["site"] == "mallory"


def test_a_site_that_may_close_rounds_is_not_let_in(gateway: Guarded, store: Store) -> None:
    """The others would wait for it to commit, to merge its parts and to close, and it can't."""
    status, words = said(gateway.ask("a", "GET", "site"))
    assert status == 403 and "site a may close rounds, and behind a gateway nobody does" in words
    with closing(gateway.store("a")) as full, pytest.raises(StoreUnusable, match=r"admit it as a guest .*--guest"):
        full.list("")


def test_where_one_site_commits_the_others_come_in_guests_or_not() -> None:
    store = open_store("memory://requests-fixed-committer")
    make_run(store, committer="a")
    Owner(store, OWNER).admit("mallory", KEYS["mallory"].public)
    with guarding(store) as gateway:
        assert gateway.ask("mallory", "GET", "site").status_code == 200
        assert gateway.ask("a", "GET", "site").status_code == 403


def test_a_site_that_was_let_in_hears_at_once_that_its_key_is_revoked(gateway: Guarded, store: Store) -> None:
    with closing(gateway.store("bob")) as bob:
        assert keys.manifest() in bob.list("")
        Owner(store, OWNER).revoke("bob")
        deadline = time.monotonic() + PATIENCE_S
        with pytest.raises(SiteRevoked, match=r"^the run's owner revoked site bob: "):
            while time.monotonic() < deadline:
                bob.list(keys.manifest())


def test_nobody_is_let_in_while_the_admissions_can_t_be_read(gateway: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.served.roster, "refresh", broken(""))
    for _ in range(2):
        assert said(gateway.ask("alice", "GET", "site"))[0] == 502
    monkeypatch.undo()
    deadline = time.monotonic() + 600
    while gateway.ask("alice", "GET", "site").status_code != 200:
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)


def test_two_sites_with_one_key_are_let_in_as_neither(gateway: Guarded, store: Store) -> None:
    Owner(store, OWNER).admit("mallory", KEYS["bob"].public)
    status, words = said(gateway.ask("bob", "GET", "site"))
    assert status == 401 and "bob and mallory have the same key" in words


@pytest.mark.parametrize(
    "path",
    [
        "objects/%2e%2e/run-2/manifest.json",
        "objects/sites/alice/000000/%63laim.json",
        "objects//manifest.json",
        "objects/sites//bob/000000/beat",
        "objects/sites/alice/../bob/000000/beat",
        "objects/sites/alice/./000000/beat",
        "objects/sites/alice/000000/beat/",
        "objects/../objects/manifest.json",
        "tickets/objects/manifest.json",
        "objects/",
        "objects",
        "",
    ],
)
def test_no_trick_with_a_path_reads_or_writes_anything(gateway: Guarded, store: Store, path: str) -> None:
    before = {key: store.get(key) for key in store.list("")}
    for method, target in (("GET", path), ("PUT", f"{path}?operation=put"), ("DELETE", path), ("POST", path)):
        assert raw(gateway, method, target) in (400, 401, 403, 404, 405), (method, target)
    assert {key: store.get(key) for key in store.list("")} == before


def raw(gateway: Guarded, method: str, target: str) -> int:
    """The status of a request whose path no client library tidies up."""
    import http.client

    signer = wire.Signer(KEYS["alice"].public, KEYS["alice"].sign)
    headers = wire.signed_headers(
        signer, method, RUN, target, wire.body_sha256(b"{}"), time_s=int(time.time()), nonce="n" + target
    )
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    try:
        connection.request(method, f"/{RUN}/{target}", b"{}" if method != "GET" else None, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_large_body_is_refused_before_it_is_read(gateway: Guarded) -> None:
    body = bytes(1024 + 1)
    status, words = said(gateway.ask("alice", "POST", f"tickets/{keys.claim('alice', 0)}", body))
    assert status == 413 and "at most 1024" in words


def test_a_body_is_not_read_for_strangers(gateway: Guarded) -> None:
    status, _ = said(gateway.ask("mallory", "PUT", CLAIM, bytes(200_000)))
    assert status == 401


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"operation":"put","nbytes":-1,"sha256":"00"}',
        b'{"operation":"take","nbytes":1,"sha256":"%s"}' % (b"0" * 64),
    ],
)
def test_a_ticket_s_order_must_make_sense(gateway: Guarded, body: bytes) -> None:
    assert said(gateway.ask("alice", "POST", f"tickets/{keys.claim('alice', 0)}", body))[0] == 400


def test_who_asks_too_often_is_told_when_to_come_again(store: Store) -> None:
    make_run(store)
    with guarding(store, rates=Rates(site=Rate(0.01, 3), gateway=FAST.gateway)) as gateway:
        answers = [gateway.ask("alice", "GET", "site") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert 60 < int(answers[-1].headers["retry-after"]) <= 100 and "asks oftener" in answers[-1].json()["error"]
        assert gateway.ask("bob", "GET", "site").status_code == 200, "one site's flood is no other's"
        assert gateway.lines()[3]["verdict"] == "refused" and gateway.lines()[3]["status"] == 429


def test_records_are_taken_at_a_bounded_rate(store: Store) -> None:
    make_run(store)
    rates = Rates(site=FAST.site, gateway=FAST.gateway, record_bytes=Rate(1, 300))
    with guarding(store, rates=rates) as gateway:
        answers = [
            gateway.ask(
                "alice", "PUT", f"objects/{keys.claim('alice', n)}?operation=create", claim(gateway, "alice", n)
            )
            for n in range(3)
        ]
    assert [answer.status_code for answer in answers] == [200, 429, 429]


def test_every_request_is_in_the_audit_log_and_no_secret_is(gateway: Guarded) -> None:
    gateway.ask("alice", "PUT", CLAIM, claim(gateway))
    gateway.ask("alice", "PUT", f"objects/{keys.commit(0, 0)}?operation=create", b"{}")
    answer = gateway.ask("mallory", "GET", f"objects/{keys.manifest()}")
    gateway.ask("alice", "GET", f"objects/{keys.commit(0, 7)}")
    written, refused, stranger, missing = gateway.lines()
    assert (written["site"], written["operation"], written["key"]) == ("alice", "create", keys.claim("alice", 0))
    assert (written["verdict"], written["nbytes"]) == ("allowed", len(claim(gateway)))
    assert (refused["verdict"], refused["status"]) == ("refused", 403) and "commit" in refused["why"]
    assert (stranger["verdict"], stranger["site"], stranger["status"]) == ("refused", "", 401)
    assert stranger["request"] == answer.headers["x-request-id"]
    assert missing["verdict"] == "missing"
    for header in (wire.SIGNATURE_HEADER, wire.NONCE_HEADER):
        assert header not in gateway.log.getvalue()


def test_a_request_that_can_t_be_logged_isn_t_confirmed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(store)
    with guarding(store) as gateway:
        monkeypatch.setattr(Audit, "write", disk_is_full)
        status, words = said(gateway.ask("alice", "GET", "site"))
    assert status == 503 and "can't write its audit log" in words


def disk_is_full(audit: Audit, entry: Entry) -> None:
    raise OSError(28, "No space left on device")


def test_a_stranger_s_long_texts_don_t_fill_the_log() -> None:
    stream = io.StringIO()
    Audit(stream).write(Entry("id", key="k" * 10_000, why="w" * 10_000))
    line = json.loads(stream.getvalue())
    assert len(line["key"]) == len(line["why"]) == 512 and len(stream.getvalue()) < 2000


def test_a_bucket_that_fails_is_said_to_fail_without_its_name(
    gateway: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.served.store, "list", broken(gateway.served.store.uri))
    answer = gateway.ask("alice", "GET", "keys?prefix=")
    assert said(answer)[0] == 502 and gateway.served.store.uri not in answer.text
    assert gateway.lines()[-1]["verdict"] == "failed" and gateway.served.store.uri in gateway.lines()[-1]["why"]


def broken(uri: str) -> Callable[..., list[str]]:
    def fail(*asked: str) -> list[str]:
        raise StoreError(f"list in {uri} failed")

    return fail
