"""A store behind a gateway: a run whose bucket's keys stay with its owner, as one of its volunteers may use it.

The gateway lists, looks at small records, and hands out tickets (presigned URLs) by which large objects go straight to
and from the bucket. What it refuses is a StoreError with its own words.
"""

import hashlib
import json
import os
import re
import time
from pathlib import Path

from composer_prime.config.table import RUN_NAME
from composer_prime.errors import ConfigError, KeyMissing, SiteRevoked, StoreError, StoreUnusable
from composer_prime.gateway.client import Answered, GatewayClient, Place, Unanswered
from composer_prime.gateway.wire import (
    INLINE_BYTES,
    KEYS,
    MISSING,
    NOT_ADMITTED,
    OBJECTS,
    REVOKED,
    SITE,
    SPAN_BYTES,
    TICKETS,
    Ticket,
)
from composer_prime.store.remote import Client, RemoteStore, Verdict
from composer_prime.sync.signatures import SigningKey

KEY_VARIABLE = "COMPOSER_PRIME_KEY"
"""Environment variable that names the key file where no key is given."""

_AUTHORITY = r"[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]"
_PLACE = re.compile(rf"(?P<root>(?:{_AUTHORITY})(?::\d{{1,5}})?(?:/[A-Za-z0-9._-]+)*)/(?P<run>{RUN_NAME})")


class _Vanished(Exception):
    """What beat our create is not there when we read it back: still being written. Worth another try."""


_FAILURES = (Unanswered, Answered, TimeoutError, _Vanished)


def open_gateway(scheme: str, rest: str, key_file: Path | None = None) -> "GatewayStore":
    """The store at gateway+`scheme`://`rest`. Reads the key file, and does no I/O beyond.

    key_file   the site's private key; None: the file that COMPOSER_PRIME_KEY names

    ConfigError when the URI names no run, or when there is no such key.
    """
    found = _PLACE.fullmatch(rest.rstrip("/"))
    if found is None:
        raise ConfigError(
            f"store URI (gateway+{scheme}://{rest}) must name a gateway and a run: write gateway+https://host/run"
        )
    named = key_file or os.environ.get(KEY_VARIABLE)
    if not named:
        raise ConfigError(
            f"store gateway+{scheme}://{rest} knows its sites by their keys, and none is given: set site.key_file, or "
            f"{KEY_VARIABLE} to the file that `composer-prime keygen` wrote"
        )
    return GatewayStore(Place(f"{scheme}://{found['root']}", found["run"]), SigningKey.load(Path(named).expanduser()))


class GatewayStore(RemoteStore):
    """Store over a gateway; see `composer_prime.store.base.Store` for what the methods promise.

    What the gateway doesn't let this site do is StoreError, with the gateway's reason; where the run doesn't admit its
    key StoreUnusable, and where not any more SiteRevoked.
    """

    _failures = _FAILURES
    _credentials_remedy = "ask the run's owner"

    def __init__(self, place: Place, key: SigningKey, *, inline_bytes: int = INLINE_BYTES) -> None:
        """inline_bytes   larger objects are sent to the bucket itself, where the gateway gives tickets for it"""
        super().__init__(f"gateway+{place.root}/{place.run}")
        self._place = place
        self._key = key
        self._inline_bytes = inline_bytes

    def introduce(self) -> None:
        """See `composer_prime.store.base.Guarded`."""
        self._reach()

    def _create(self, key: str, data: bytes) -> bool:
        return self._write("create", key, data)

    def _put(self, key: str, data: bytes | memoryview) -> None:
        if not self._write("put", key, data):
            raise StoreError(f"put of {key} in {self.uri} failed: other bytes stand there, and it is written once")

    def _read(self, key: str, span: tuple[int, int] | None) -> bytes:
        num_bytes = None if span is None else span[1]
        return self._run(
            "get", key, lambda client, left_s: _read(client, key, left_s, span or (0, None)), num_bytes=num_bytes
        )

    def _list(self, prefix: str) -> list[str]:
        data, _ = self._run("list", prefix, lambda client, left_s: client.ask("GET", f"{KEYS}?prefix={prefix}", left_s))
        try:
            return [str(key) for key in json.loads(data)["keys"]]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"list of {prefix} in {self.uri} failed: the gateway's answer is no list") from error

    def _delete(self, key: str) -> None:
        self._run("delete", key, lambda client, left_s: client.ask("DELETE", f"{OBJECTS}/{key}", left_s))

    def close(self) -> None:
        client, self._made = self._made, None
        if client is not None:
            client.close()

    def _write(self, operation: str, key: str, data: bytes | memoryview) -> bool:
        """Whether the bytes stand at the key: written now, or by our own first try."""
        order = {"operation": operation, "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

        def attempt(client: GatewayClient, left_s: float) -> bool:
            if len(data) > self._inline_bytes:
                answer, _ = client.ask("POST", f"{TICKETS}/{key}", left_s, json.dumps(order).encode())
                ticket = Ticket.from_bytes(answer)
                if ticket.url is not None:
                    return _send(client, key, ticket, data, left_s)
            answer, _ = client.ask("PUT", f"{OBJECTS}/{key}?operation={operation}", left_s, data)
            return json.loads(answer)["stands"] is True

        return self._run(operation, key, attempt, num_bytes=2 * len(data))

    def _connect(self) -> Client:
        return GatewayClient(self._place, self._key)

    def _look(self, client: Client, left_s: float) -> object:
        return client.ask("GET", SITE, left_s)

    def _verdict(self, error: Exception) -> Verdict:
        if not isinstance(error, Answered):
            return Verdict.PASSES
        if error.by_bucket and error.status == 403:  # a ticket that came too late; the next try brings a new one
            return Verdict.PASSES if "xpired" in str(error) else Verdict.LASTS
        passes = error.status in (408, 409, 425, 429) or (error.status >= 500 and error.status != 501)
        return Verdict.PASSES if passes else Verdict.LASTS

    def _cause(self, error: Exception) -> str:
        return str(error)

    def _translated(self, what: str, key: str, error: Exception) -> Exception:
        if isinstance(error, Answered):
            if error.status == 404 and key and (error.by_bucket or error.code == MISSING):
                return KeyMissing(f"no object at {key} in {self.uri}")
            if error.code == REVOKED:
                return SiteRevoked(str(error))
            if not error.by_bucket and not error.code and error.status >= 500:
                return StoreError(
                    f"{what} failed: what stands before the gateway at {self._place.root} says: {error} "
                    f"({error.status}): ask the run's owner whether the gateway runs"
                )
            who = "the bucket" if error.by_bucket else "the gateway"
            kind = StoreUnusable if error.code == NOT_ADMITTED else StoreError
            return kind(f"{what} failed: {who} says: {error} ({error.status})")
        return StoreError(
            f"{what} failed: no sound answer from {self._place.root} ({error or type(error).__name__}): check the "
            "network and the proxy settings, and ask the run's owner whether the gateway runs"
        )


def _read(client: GatewayClient, key: str, left_s: float, span: tuple[int, int | None] = (0, None)) -> bytes:
    """An object's bytes from an offset, so many or all (None), from wherever the gateway says."""
    (start, length), deadline = span, time.monotonic() + left_s
    pieces, num_read = list[bytes](), 0
    while True:
        wanted = SPAN_BYTES if length is None else min(SPAN_BYTES, length - num_read)
        target = f"{OBJECTS}/{key}?start={start + num_read}&length={wanted}"
        answer, is_ticket = client.ask("GET", target, max(0.0, deadline - time.monotonic()))
        if is_ticket:
            return _fetch(client, Ticket.from_bytes(answer), left_s, span)
        pieces.append(answer)
        num_read += len(answer)
        if len(answer) < wanted or num_read == length:
            return b"".join(pieces)


def _fetch(client: GatewayClient, ticket: Ticket, left_s: float, span: tuple[int, int | None]) -> bytes:
    start, length = span
    if length is None:
        return client.fetch(ticket, left_s)
    try:
        return client.fetch(ticket, left_s, (start, start + max(length, 1) - 1))[:length]
    except Answered as error:
        if error.status == 416:
            return b""
        raise


def _send(client: GatewayClient, key: str, ticket: Ticket, data: bytes | memoryview, left_s: float) -> bool:
    """Send an object by a ticket; whether its bytes stand there, written now or by an earlier try of ours."""
    try:
        client.send(ticket, data, left_s)
        return True
    except Answered as error:
        if error.status not in (409, 412):
            raise
    try:
        return _read(client, key, left_s, (0, len(data) + 1)) == data
    except Answered as error:
        if error.status == 404:
            raise _Vanished from error
        raise
