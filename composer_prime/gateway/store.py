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
from composer_prime.store.remote import Answer, RemoteStore, Verdict
from composer_prime.sync.signatures import SigningKey

KEY_VARIABLE = "COMPOSER_PRIME_KEY"
"""Environment variable that names the key file where no key is given."""

_AUTHORITY = r"[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]"
_PLACE = re.compile(rf"(?P<root>(?:{_AUTHORITY})(?::\d{{1,5}})?(?:/[A-Za-z0-9._-]+)*)/(?P<run>{RUN_NAME})")


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

    is_guarded = True
    _failures = (Unanswered, Answered, OSError)

    def __init__(self, place: Place, key: SigningKey, *, inline_bytes: int = INLINE_BYTES) -> None:
        """inline_bytes   larger objects are sent to the bucket itself, where the gateway gives tickets for it"""
        super().__init__(f"gateway+{place.root}/{place.run}")
        self._client = GatewayClient(place, key)
        self._place = place
        self._inline_bytes = inline_bytes

    def close(self) -> None:
        self._client.close()

    def _look(self, left_s: float) -> object:
        return self._client.ask("GET", SITE, left_s)

    def _fetch(self, key: str, left_s: float, span: tuple[int, int] | None) -> bytes:
        """From wherever the gateway says."""
        deadline = time.monotonic() + left_s
        start, end = (0, None) if span is None else (span[0], span[1] + 1)
        pieces = list[bytes]()
        while True:
            wanted = SPAN_BYTES if end is None else min(SPAN_BYTES, end - start)
            target = f"{OBJECTS}/{key}?start={start}&length={wanted}"
            answer, is_ticket = self._client.ask("GET", target, max(0.0, deadline - time.monotonic()))
            if is_ticket:
                return self._client.fetch(Ticket.from_bytes(answer), left_s, span)
            pieces.append(answer)
            start += len(answer)
            if len(answer) != wanted or start == end:
                return b"".join(pieces)

    def _store(self, key: str, data: bytes | memoryview, left_s: float, *, if_absent: bool) -> None:
        operation = "create" if if_absent else "put"
        if len(data) > self._inline_bytes:
            order = {"operation": operation, "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            answer, _ = self._client.ask("POST", f"{TICKETS}/{key}", left_s, json.dumps(order).encode())
            ticket = Ticket.from_bytes(answer)
            if ticket.url is not None:
                self._client.send(ticket, data, left_s)
                return
        answer, _ = self._client.ask("PUT", f"{OBJECTS}/{key}?operation={operation}", left_s, data)
        if json.loads(answer)["stands"] is not True:
            raise Answered(412, "stands", "other bytes stand there", by_bucket=False)

    def _names(self, prefix: str, left_s: float) -> list[str]:
        data, _ = self._client.ask("GET", f"{KEYS}?prefix={prefix}", left_s)
        try:
            return [str(key) for key in json.loads(data)["keys"]]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"list of {prefix} in {self.uri} failed: the gateway's answer is no list") from error

    def _remove(self, key: str, left_s: float) -> None:
        self._client.ask("DELETE", f"{OBJECTS}/{key}", left_s)

    def _answer(self, error: Exception) -> Answer:
        if isinstance(error, Answered):
            return Answer(error.status, error.code, str(error))
        return Answer(0, "", str(error) or type(error).__name__)

    def _verdict(self, error: Exception) -> Verdict:
        answer = self._answer(error)
        # A ticket that came too late is forbidden by the bucket; the next try brings a new one.
        is_late = isinstance(error, Answered) and error.by_bucket and answer.status == 403 and "xpired" in answer.words
        return Verdict.PASSES if answer.passes or is_late or not answer.status else Verdict.LASTS

    def _failure(self, what: str, key: str, error: Exception) -> Exception:
        if not isinstance(error, Answered):
            return StoreError(
                f"{what}: no sound answer from {self._place.root} ({error or type(error).__name__}): check the "
                "network and the proxy settings, and ask the run's owner whether the gateway runs"
            )
        if error.status == 404 and key and (error.by_bucket or error.code == MISSING):
            return KeyMissing(f"no object at {key} in {self.uri}")
        if error.code == REVOKED:
            return SiteRevoked(str(error))
        if not error.by_bucket and not error.code and error.status >= 500:
            return StoreError(
                f"{what}: what stands before the gateway at {self._place.root} says: {error} "
                f"({error.status}): ask the run's owner whether the gateway runs"
            )
        who = "the bucket" if error.by_bucket else "the gateway"
        kind = StoreUnusable if error.code == NOT_ADMITTED else StoreError
        return kind(f"{what}: {who} says: {error} ({error.status})")
