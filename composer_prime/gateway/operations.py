"""What a gateway does with a request whose sender it knows: asks the rules, then reads, writes, lists or tickets.

Contents aren't judged: whoever reads a record or a payload does that. Blocks on the bucket; called in threads.
"""

import json
from dataclasses import dataclass
from typing import Any

from composer_prime.errors import StoreError
from composer_prime.gateway import policy
from composer_prime.gateway.limits import Limits
from composer_prime.gateway.policy import Operation, Refusal
from composer_prime.gateway.rules import MemberRules
from composer_prime.gateway.tickets import MAX_PUT_BYTES, Tickets
from composer_prime.gateway.wire import INLINE_BYTES, SPAN_BYTES, Ticket
from composer_prime.store.base import MAX_CREATE_BYTES, Store, check_prefix

KEYS_A_REQUEST = 1000
"""Keys in a listing that cost as much as one request."""

Answer = bytes | dict[str, Any]
"""An object's bytes, or what goes out as JSON."""


@dataclass(frozen=True)
class Operations:
    """One run's store, and who may do what in it. `tickets` None: all bytes go through the gateway."""

    store: Store
    rules: MemberRules
    limits: Limits
    tickets: Tickets | None
    max_object_bytes: int

    @property
    def max_body_bytes(self) -> int:
        """The most that a request may bring."""
        return INLINE_BYTES if self.tickets is not None else min(self.max_object_bytes, MAX_CREATE_BYTES)

    def read(self, key: str, start: int, length: int) -> Answer:
        """A span of an object, SPAN_BYTES at most, or a ticket for the object. Raises KeyMissing."""
        if refusal := policy.read_refusal(key):
            raise Refusal("forbidden", refusal)
        if self.tickets is not None and policy.is_bulk(key):
            return self.tickets.to_read(key).to_json()
        return self.store.get_range(key, start, min(length, SPAN_BYTES))

    def list(self, site: str, prefix: str) -> Answer:
        """The keys with a prefix that a member may read. Long listings count as several requests."""
        try:
            check_prefix(prefix)
        except StoreError as error:
            raise Refusal("malformed", str(error)) from error
        found = self.store.list(prefix)
        self.limits.owe(site, len(found) // KEYS_A_REQUEST)
        return {"keys": [key for key in found if policy.read_refusal(key) is None]}

    def check_write(self, site: str, operation: str, key: str, nbytes: int) -> Operation:
        """Raise Refusal when so many bytes may not be written there."""
        if operation not in ("create", "put"):
            raise Refusal("malformed", f"operation ({operation[:16]!r}) must be create or put")
        if refusal := self.rules.write_refusal(site, operation, key, nbytes):
            raise Refusal("forbidden", refusal)
        return operation

    def write(self, site: str, operation: str, key: str, data: bytes) -> Answer:
        """Write an object that came along, if the rules let it; whether its bytes stand there."""
        operation = self.check_write(site, operation, key, len(data))
        if not policy.is_bulk(key) and (wait_s := self.limits.record(site, len(data))):
            raise Refusal("busy", f"site {site} writes records faster than they are taken", retry_after_s=wait_s)
        if operation == "create" or policy.is_written_once(key):
            return {"stands": self.store.create(key, data)}
        self.store.put(key, data)
        return {"stands": True}

    def delete(self, site: str, key: str) -> Answer:
        """Delete an object, if the rules let it: those of members don't."""
        if refusal := self.rules.write_refusal(site, "delete", key, 0):
            raise Refusal("forbidden", refusal)
        self.store.delete(key)
        return {}

    def ticket(self, site: str, key: str, body: bytes) -> Answer:
        """A ticket to write an object that the body describes: operation, nbytes, sha256."""
        try:
            order = json.loads(body)
            named, nbytes, sha256 = str(order["operation"]), order["nbytes"], bytes.fromhex(order["sha256"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refusal("malformed", f"a ticket's order names operation, nbytes and sha256: {error!r}") from error
        if type(nbytes) is not int or nbytes < 0 or len(sha256) != 32:
            raise Refusal("malformed", "a ticket's order names nbytes (from 0) and sha256 (64 hex digits)")
        operation = self.check_write(site, named, key, nbytes)
        if self.tickets is None or (nbytes <= INLINE_BYTES and not policy.is_bulk(key)):
            return Ticket().to_json()
        if not policy.is_bulk(key) or nbytes > MAX_PUT_BYTES:
            most = MAX_PUT_BYTES if policy.is_bulk(key) else INLINE_BYTES
            raise Refusal("large", f"{key} has {nbytes} bytes, at most {most} are taken: use more fragments")
        if_absent = operation == "create" or policy.is_written_once(key)
        return self.tickets.to_write(key, nbytes, sha256, if_absent=if_absent).to_json()
