"""What a gateway does with a request whose sender it knows: asks the rules, then reads, writes, lists or tickets.

A ticket is a URL for the bucket itself that reads one object, or writes these very bytes at one key, for a short time.
Contents aren't judged: whoever reads a record or a payload does that. Blocks on the bucket; called in threads.
"""

import base64
import json
from dataclasses import dataclass
from typing import Any

from composer_prime.errors import INSTALL, BadInput, StoreError
from composer_prime.gateway.limits import Limits
from composer_prime.gateway.rules import MemberRules, Operation, Refusal, is_bulk, is_written_once, read_refusal
from composer_prime.gateway.wire import INLINE_BYTES, SPAN_BYTES, Ticket
from composer_prime.store.base import MAX_CREATE_BYTES, Store, check_prefix
from composer_prime.store.obstore import ObjectStore

KEYS_A_REQUEST = 1000
"""Keys in a listing that cost as much as one request."""

EXPIRES_S = 120
"""How long a ticket lasts: so long may a site that is revoked just now still use the last one that it got."""
MAX_PUT_BYTES = 5 * 2**30
"""The most that S3 takes in one PUT."""

Answer = bytes | dict[str, Any]
"""An object's bytes, or what goes out as JSON."""


class Tickets:
    """Presigned URLs, signed with the gateway's own credentials, which the AWS tools' library finds."""

    def __init__(self, store: ObjectStore) -> None:
        """ModuleNotFoundError without botocore."""
        from botocore.config import Config
        from botocore.session import get_session

        place = store.place
        self._place, self._folder = place, f"{place.prefix}/" if place.prefix else ""
        self._client: Any = get_session().create_client(
            "s3",
            endpoint_url=place.endpoint or None,
            region_name=place.region or None,
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"} if place.scheme == "hf" else None),
        )

    def to_read(self, key: str) -> Ticket:
        """For one object, whole or in part. Raises StoreError when the credentials can't be had."""
        return Ticket(self._signed("get_object", key))

    def to_write(self, key: str, nbytes: int, sha256: bytes, *, if_absent: bool) -> Ticket:
        """For these bytes at this key; with `if_absent` where nothing stands. Raises as `to_read`.

        Their length is part of what is signed, and their hash, which a store that knows S3's checksums compares.
        """
        checksum = base64.b64encode(sha256).decode()
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        url = self._signed("put_object", key, ContentLength=nbytes, ChecksumSHA256=checksum, **condition)
        headers = {"content-length": str(nbytes), "x-amz-checksum-sha256": checksum}
        return Ticket(url, headers | ({"if-none-match": "*"} if if_absent else {}))

    def _signed(self, operation: str, key: str, **more: Any) -> str:
        from botocore.exceptions import BotoCoreError

        place = {"Bucket": self._place.bucket, "Key": self._folder + key}
        try:
            return self._client.generate_presigned_url(operation, Params={**place, **more}, ExpiresIn=EXPIRES_S)
        except BotoCoreError as error:
            raise StoreError(f"presign of {key} failed: {error}: check the gateway's credentials") from error


def tickets_of(store: Store) -> Tickets | None:
    """What makes tickets for a store; None when its bytes must go through the gateway.

    BadInput where it could, but boto3 isn't installed, which signs what a request must hold.
    """
    if not isinstance(store, ObjectStore) or store.place.scheme not in ("s3", "hf"):
        return None
    try:
        return Tickets(store)
    except ModuleNotFoundError as error:
        raise BadInput(f"a gateway before {store.uri} needs boto3: {INSTALL.format('aws')}") from error


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
        if refusal := read_refusal(key):
            raise Refusal("forbidden", refusal)
        if self.tickets is not None and is_bulk(key):
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
        return {"keys": [key for key in found if read_refusal(key) is None]}

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
        if not is_bulk(key) and (wait_s := self.limits.record(site, len(data))):
            raise Refusal("busy", f"site {site} writes records faster than they are taken", retry_after_s=wait_s)
        if operation == "create" or is_written_once(key):
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
        if self.tickets is None or (nbytes <= INLINE_BYTES and not is_bulk(key)):
            return Ticket().to_json()
        if not is_bulk(key) or nbytes > MAX_PUT_BYTES:
            most = MAX_PUT_BYTES if is_bulk(key) else INLINE_BYTES
            raise Refusal("large", f"{key} has {nbytes} bytes, at most {most} are taken: use more fragments")
        if_absent = operation == "create" or is_written_once(key)
        return self.tickets.to_write(key, nbytes, sha256, if_absent=if_absent).to_json()
