"""Tickets for the bucket itself: URLs that read one object, or write these very bytes at one key, for a short time."""

from typing import Protocol

from composer_prime.store.base import Store
from composer_prime.store.gateway_wire import Ticket
from composer_prime.store.s3 import S3Store

EXPIRES_S = 120
"""How long a ticket lasts: so long may a site that is revoked just now still use the last one that it got."""
MAX_PUT_BYTES = 5 * 2**30
"""The most that S3 takes in one PUT."""


class Tickets(Protocol):
    """Makes tickets. Raises StoreError when the credentials can't be had."""

    def to_read(self, key: str) -> Ticket:
        """For one object, whole or in part."""
        ...

    def to_write(self, key: str, nbytes: int, sha256: bytes, *, if_absent: bool) -> Ticket:
        """For these bytes at this key; with `if_absent` where nothing stands."""
        ...


def tickets_of(store: Store) -> Tickets | None:
    """What makes tickets for a store; None when its bytes must go through the gateway."""
    return S3Tickets(store) if isinstance(store, S3Store) else None


class S3Tickets:
    """Presigned URLs, signed with the gateway's own credentials."""

    def __init__(self, store: S3Store) -> None:
        self._store = store

    def to_read(self, key: str) -> Ticket:
        return Ticket(self._store.presign_get(key, EXPIRES_S))

    def to_write(self, key: str, nbytes: int, sha256: bytes, *, if_absent: bool) -> Ticket:
        url, headers = self._store.presign_put(key, EXPIRES_S, nbytes=nbytes, sha256=sha256, if_absent=if_absent)
        return Ticket(url, headers)
