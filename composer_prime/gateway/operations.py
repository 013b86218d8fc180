"""What a gateway does with a request whose sender it knows: asks the rules, then reads, writes, lists or tickets.

Blocks on the bucket; the app calls it in threads.
"""

import json
from dataclasses import dataclass
from typing import Any

from composer_prime.errors import StoreError
from composer_prime.gateway.audit import Entry
from composer_prime.gateway.limits import Limits
from composer_prime.gateway.policy import Operation
from composer_prime.gateway.refusal import busy, forbidden, malformed, too_large
from composer_prime.gateway.rules import Rules
from composer_prime.gateway.tickets import MAX_PUT_BYTES, Tickets
from composer_prime.store.base import MAX_CREATE_BYTES, Store, check_prefix, is_key
from composer_prime.store.gateway_wire import INLINE_BYTES, SPAN_BYTES, Ticket

KEYS_A_REQUEST = 1000
"""Keys in a listing that cost as much as one request."""

Answer = bytes | dict[str, Any]
"""An object's bytes, or what goes out as JSON."""


@dataclass(frozen=True)
class Operations:
    """One run's store, and who may do what in it. `tickets` None: all bytes go through the gateway."""

    store: Store
    rules: Rules
    limits: Limits
    tickets: Tickets | None
    max_object_bytes: int

    @property
    def max_body_bytes(self) -> int:
        """The most that a request may bring."""
        return INLINE_BYTES if self.tickets is not None else min(self.max_object_bytes, MAX_CREATE_BYTES)

    def read(self, key: str, span: tuple[int, int] | None, entry: Entry) -> Answer:
        """An object's bytes, or those of (start, length), or a ticket for them. Raises KeyMissing.

        What goes through the gateway has at most SPAN_BYTES: a whole object that is larger is refused, too.
        """
        if refusal := self.rules.read_refusal(key):
            raise forbidden(refusal)
        if self.tickets is not None and self.rules.is_bulk(key):
            return self.tickets.to_read(key).to_json()
        start, length = (0, SPAN_BYTES + 1) if span is None else span
        if span is not None and length > SPAN_BYTES:
            raise too_large(f"{length} bytes of {key} are asked for, at most {SPAN_BYTES} go through this gateway")
        data = self.store.get_range(key, start, length)
        if len(data) > SPAN_BYTES:
            raise too_large(f"{key} has more than {SPAN_BYTES} bytes: ask for spans of it")
        entry.nbytes = len(data)
        return data

    def list(self, site: str, prefix: str) -> Answer:
        """The keys with a prefix that a member may read. Long listings count as several requests."""
        try:
            check_prefix(prefix)
        except StoreError as error:
            raise malformed(str(error)) from error
        found = self.store.list(prefix)
        self.limits.owe(site, len(found) // KEYS_A_REQUEST)
        return {"keys": [key for key in found if self.rules.read_refusal(key) is None]}

    def check_write(self, site: str, named: str, key: str, nbytes: int) -> None:
        """Raise Refusal when so many bytes may not be written there, whatever they are."""
        self._check(site, _operation(named), key, nbytes)

    def write(self, site: str, named: str, key: str, data: bytes) -> Answer:
        """Write an object that came along, if the rules let it; whether its bytes stand there."""
        operation = _operation(named)
        self._check(site, operation, key, len(data))
        if not self.rules.is_bulk(key) and (wait_s := self.limits.record(site, len(data))):
            raise busy(f"site {site} writes records faster than this gateway takes them", wait_s)
        if fault := self.rules.content_fault(site, key, data):
            raise forbidden(fault)
        if operation == "create" or self.rules.is_written_once(key):
            return {"stands": self.store.create(key, data)}
        self.store.put(key, data)
        return {"stands": True}

    def delete(self, site: str, key: str) -> Answer:
        """Delete an object, if the rules let it."""
        self._check(site, "delete", key, 0)
        self.store.delete(key)
        return {}

    def ticket(self, site: str, key: str, body: bytes, entry: Entry) -> Answer:
        """A ticket to write an object that the body describes: operation, nbytes, sha256."""
        operation, nbytes, sha256 = _order(body)
        entry.operation, entry.nbytes = operation, nbytes
        self._check(site, operation, key, nbytes)
        if self.tickets is None or (nbytes <= INLINE_BYTES and not self.rules.is_bulk(key)):
            return Ticket().to_json()
        if not self.rules.is_bulk(key):
            raise too_large(f"{key} has {nbytes} bytes and comes through the gateway, which takes {INLINE_BYTES}")
        if nbytes > MAX_PUT_BYTES:
            raise too_large(f"{key} has {nbytes} bytes, S3 takes at most {MAX_PUT_BYTES} at once: use more fragments")
        if_absent = operation == "create" or self.rules.is_written_once(key)
        return self.tickets.to_write(key, nbytes, sha256, if_absent=if_absent).to_json()

    def _check(self, site: str, operation: Operation, key: str, nbytes: int) -> None:
        if not is_key(key):
            raise forbidden(
                f"{key[:80]!r} is no key: ASCII segments joined by single slashes, none starting with a dot"
            )
        if refusal := self.rules.write_refusal(site, operation, key, nbytes):
            raise forbidden(refusal)


def _operation(named: str) -> Operation:
    if named == "create" or named == "put":
        return named
    raise malformed(f"operation ({named[:16]!r}) must be create or put")


def _order(body: bytes) -> tuple[Operation, int, bytes]:
    try:
        order = json.loads(body)
        operation, nbytes, sha256 = order["operation"], order["nbytes"], bytes.fromhex(order["sha256"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise malformed(f"a ticket's order names operation, nbytes and sha256: {error!r}") from error
    if not isinstance(operation, str) or type(nbytes) is not int or nbytes < 0 or len(sha256) != 32:
        raise malformed("a ticket's order names operation (text), nbytes (from 0) and sha256 (64 hex digits)")
    return _operation(operation), nbytes, sha256
