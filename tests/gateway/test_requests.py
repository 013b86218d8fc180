"""Who is let in: signatures over every part of a request, times, replays, other runs, revoked keys, paths, floods."""

import re
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import pytest

from composer_prime.errors import SiteRevoked, StoreError, StoreUnusable
from composer_prime.gateway import wire
from composer_prime.gateway.identity import Identities
from composer_prime.gateway.rules import Refusal
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.owner import Owner
from tests.gateway.guarded import KEYS, OWNER, PATIENCE_S, RUN, Guarded, beat_of, claim_of, make_run, signed

CLAIM = f"objects/{keys.claim('alice', 0)}?operation=create"


def claim(gateway: Guarded, name: str = "alice", incarnation: int = 0) -> bytes:
    return signed(gateway.served, name, claim_of(name, incarnation))


def said(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]


def test_a_sound_request_is_answered_and_health_asks_for_no_signature(gateway: Guarded) -> None:
    assert gateway.ask("alice", "GET", "site").json() == {"site": "alice", "run": RUN}
    assert gateway.ask("alice", "PUT", CLAIM, claim(gateway)).json() == {"stands": True}
    health = httpx.get(f"{gateway.root}/health", trust_env=False, timeout=PATIENCE_S)
    assert health.json() == {"status": "ready", "run": RUN}


OTHERWISE_SIGNED: dict[str, dict[str, Any]] = {
    "another key": {"signed_as": f"objects/{keys.claim('alice', 1)}?operation=create"},
    "another operation": {"signed_as": CLAIM.replace("create", "put")},
    "another method": {"signed_method": "GET"},
    "another run": {"run": "run-2", "sent_run": RUN},
    "another site": {"headers": {wire.KEY_HEADER: KEYS["bob"].public}},
    "another nonce": {"headers": {wire.NONCE_HEADER: "0" * 24}},
    "zeros": {"headers": {wire.SIGNATURE_HEADER: "A" * 86 + "=="}},
    "junk": {"headers": {wire.SIGNATURE_HEADER: "not base64"}},
}


def test_a_signature_over_anything_else_is_refused(gateway: Guarded, store: Store) -> None:
    now, body = int(time.time()), claim(gateway)
    later = {"time_s": now, "headers": {wire.TIME_HEADER: str(now + 1)}}
    for what, changes in (OTHERWISE_SIGNED | {"another time": later}).items():
        status, words = said(gateway.ask("alice", "PUT", CLAIM, body, **changes))
        assert status == 401 and "signature isn't one of" in words, what
    status, words = said(gateway.ask("alice", "PUT", CLAIM, body, signed_body=body + b" "))
    assert status == 401 and "body isn't the one that was signed" in words
    assert not store.list(keys.site_prefix("alice"))


def test_an_unsigned_request_gets_nothing(gateway: Guarded, store: Store) -> None:
    before = store.list("")
    for method, target in (
        ("GET", "site"),
        ("GET", "keys?prefix="),
        ("GET", f"objects/{keys.manifest()}?start=0&length=9"),
        ("PUT", CLAIM),
        ("DELETE", f"objects/{keys.manifest()}"),
        ("POST", f"tickets/{keys.manifest()}"),
    ):
        url = f"{gateway.root}/{RUN}/{target}"
        answer = httpx.request(method, url, content=b"{}", trust_env=False, timeout=PATIENCE_S)
        assert said(answer) == (401, f"the request isn't signed, it has no {wire.KEY_HEADER}: use a gateway+ store")
    for header in (wire.TIME_HEADER, wire.NONCE_HEADER, wire.BODY_HEADER, wire.SIGNATURE_HEADER):
        status, words = said(gateway.ask("alice", "GET", "keys?prefix=", headers={header: ""}))
        assert status == 401 and f"has no {header}" in words
    assert store.list("") == before


def test_an_expired_or_early_request_hears_how_far_its_clock_is_off(gateway: Guarded) -> None:
    for off_s, way in ((-400, "behind"), (400, "ahead of")):
        status, words = said(gateway.ask("alice", "GET", "site", time_s=int(time.time()) + off_s))
        assert status == 401 and f"s {way} the gateway's clock, at most 300 s" in words, words
        assert "set this machine's clock" in words
        off = re.search(r"time is (\d+) s", words)
        assert off is not None and 340 < int(off[1]) < 460  # a busy machine may take a while to send and answer


def test_a_kept_write_can_t_be_sent_again(gateway: Guarded, store: Store) -> None:
    fixed = {"time_s": int(time.time()), "nonce": "1" * 24}
    first = signed(gateway.served, "alice", beat_of("alice", counter=1))
    target = f"objects/{keys.beat('alice', 0)}?operation=put"
    assert gateway.ask("alice", "PUT", target, first, **fixed).status_code == 200
    status, words = said(gateway.ask("alice", "PUT", target, first, **fixed))
    assert status == 401 and "was sent before" in words


def test_remembered_signatures_are_forgotten_when_their_time_is_over(store: Store) -> None:
    run, now = make_run(store), [1000.0]
    identities = Identities(run.roster, RUN, clock=lambda: now[0], wall=lambda: now[0])
    headers = wire.signed_headers(KEYS["alice"], "PUT", RUN, "x", b"", time_s=1000, nonce="n")

    def ask() -> None:
        assert identities.site_of("PUT", "x", headers) == "alice"
        identities.check_once(headers[wire.SIGNATURE_HEADER])

    ask()
    with pytest.raises(Refusal, match="sent before"):
        ask()
    now[0] += 601
    with pytest.raises(Refusal, match="601 s behind"):
        ask()


def test_another_run_is_not_served_and_a_stranger_hears_the_way_in(gateway: Guarded) -> None:
    status, words = said(gateway.ask("alice", "GET", "keys?prefix=", run="run-2"))
    assert status == 404 and "serves run run, not 'run-2'" in words
    status, words = said(gateway.ask("mallory", "GET", "site"))
    assert status == 401 and KEYS["mallory"].public in words and "ask its owner to admit it" in words


def test_a_revoked_key_is_refused_within_seconds_and_an_admitted_one_let_in(gateway: Guarded, store: Store) -> None:
    with closing(gateway.store("bob")) as bob:
        assert keys.manifest() in bob.list("")
        Owner(store, OWNER).revoke("bob")
        Owner(store, OWNER).admit("mallory", KEYS["mallory"].public, guest=True)
        deadline = time.monotonic() + PATIENCE_S
        with pytest.raises(SiteRevoked, match=r"^the run's owner revoked site bob: "):
            while time.monotonic() < deadline:
                bob.list(keys.manifest())
    assert said(gateway.ask("bob", "GET", "site")) == (401, str(SiteRevoked.of("bob")))
    assert gateway.ask("mallory", "GET", "site").json()["site"] == "mallory"


def test_a_site_that_may_close_rounds_is_not_let_in(gateway: Guarded, store: Store) -> None:
    """The others would wait for it to commit, to merge its parts and to close, and it can't."""
    status, words = said(gateway.ask("a", "GET", "site"))
    assert status == 403 and "site a may close rounds, and behind a gateway nobody does" in words
    with closing(gateway.store("a")) as full, pytest.raises(StoreUnusable, match=r"admit it as a guest .*--guest"):
        full.list("")


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


TRICKS = [
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
]


def test_no_trick_with_a_path_reads_or_writes_anything(gateway: Guarded, store: Store) -> None:
    before = {key: store.get(key) for key in store.list("")}
    for path in TRICKS:
        for method, target in (
            ("GET", f"{path}?start=0&length=9"),
            ("PUT", f"{path}?operation=put"),
            ("DELETE", path),
            ("POST", path),
        ):
            assert raw(gateway, method, target) in (400, 401, 403, 404, 405), (method, target)
    assert {key: store.get(key) for key in store.list("")} == before


def raw(gateway: Guarded, method: str, target: str) -> int:
    """The status of a request whose path no client library tidies up."""
    import http.client

    body = b"{}" if method in ("PUT", "POST") else b""
    headers = wire.signed_headers(KEYS["alice"], method, RUN, target, body)
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    try:
        connection.request(method, f"/{RUN}/{target}", body or None, headers)
        return connection.getresponse().status
    finally:
        connection.close()


ORDER = f"tickets/{keys.claim('alice', 0)}"
NONSENSE = [
    ("alice", "POST", ORDER, bytes(1025), 413),
    ("alice", "PUT", CLAIM, b"x" * 5000, 403),
    ("mallory", "PUT", CLAIM, bytes(200_000), 401),
    ("alice", "GET", f"objects/{keys.manifest()}?start=x&length=1", b"", 400),
    ("alice", "GET", f"objects/{keys.manifest()}?start=0", b"", 400),
    ("alice", "PUT", CLAIM.replace("create", "take"), b"{}", 400),
    ("alice", "POST", ORDER, b"", 400),
    ("alice", "POST", ORDER, b"[]", 400),
    ("alice", "POST", ORDER, b"[" * 900, 400),
    ("alice", "POST", ORDER, b'{"operation":"put","nbytes":-1,"sha256":"00"}', 400),
    ("alice", "POST", ORDER, b'{"operation":"take","nbytes":1,"sha256":"%s"}' % (b"0" * 64), 400),
]


def test_what_makes_no_sense_is_refused(gateway: Guarded, store: Store) -> None:
    for name, method, target, body, status in NONSENSE:
        assert said(gateway.ask(name, method, target, body))[0] == status, (method, target, body)
    assert not store.list(keys.site_prefix("alice"))


def test_who_sends_an_object_says_how_long_it_is(gateway: Guarded) -> None:
    headers = wire.signed_headers(KEYS["alice"], "PUT", RUN, CLAIM, b"x")
    answer = httpx.put(
        f"{gateway.root}/{RUN}/{CLAIM}", content=iter([b"x"]), headers=headers, trust_env=False, timeout=PATIENCE_S
    )
    assert said(answer)[0] == 411


def test_every_request_is_noted_and_no_secret_is(gateway: Guarded) -> None:
    gateway.ask("alice", "PUT", CLAIM, claim(gateway))
    gateway.ask("alice", "PUT", f"objects/{keys.commit(0, 0)}?operation=create", b"{}")
    gateway.ask("mallory", "GET", f"objects/{keys.manifest()}?start=0&length=9")
    gateway.ask("alice", "GET", f"objects/{keys.commit(0, 7)}?start=0&length=9")
    gateway.ask("alice", "GET", f"objects/{'k' * 10_000}?start=0&length=9")
    written, refused, stranger, missing, long = gateway.lines()
    assert (written["site"], written["method"], written["key"]) == ("alice", "PUT", keys.claim("alice", 0))
    assert (written["status"], written["nbytes"]) == (200, len(claim(gateway)))
    assert (refused["site"], refused["status"]) == ("alice", 403) and "commit" in refused["why"]
    assert (stranger["site"], stranger["status"]) == ("", 401) and missing["status"] == 404
    assert len(long["key"]) == 512
    noted = "".join(gateway.noted)
    assert wire.SIGNATURE_HEADER not in noted and wire.NONCE_HEADER not in noted


def test_a_request_at_which_the_gateway_itself_fails_is_noted(
    gateway: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> str:
        raise MemoryError

    monkeypatch.setattr(Identities, "site_of", fail)
    assert gateway.ask("alice", "GET", "site").status_code == 500
    assert [line["status"] for line in gateway.lines()] == [500]


def test_a_bucket_that_fails_is_said_to_fail_without_its_name(
    gateway: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.served.store, "list", broken(gateway.served.store.uri))
    answer = gateway.ask("alice", "GET", "keys?prefix=")
    assert said(answer)[0] == 502 and gateway.served.store.uri not in answer.text
    assert gateway.served.store.uri in gateway.lines()[-1]["why"]


def broken(uri: str) -> Callable[..., list[str]]:
    def fail(*asked: str) -> list[str]:
        raise StoreError(f"list in {uri} failed")

    return fail
