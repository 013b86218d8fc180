"""Reads a record of somebody else's: at most so many bytes, parsed, its kind known."""

import json
from typing import TypeVar

from composer_prime.errors import CorruptObject, KeyMissing, ProtocolError
from composer_prime.store.base import Store
from composer_prime.sync.canonical import MAX_RECORD_BYTES, PROTOCOL, Record

R = TypeVar("R", bound=Record)


def read_bytes(store: Store, key: str) -> bytes:
    """What stands at `key`, one byte more than a record may have at most. Raises KeyMissing."""
    return store.get_range(key, 0, MAX_RECORD_BYTES + 1)


def check_protocol(data: bytes, key: str) -> None:
    """Raise ProtocolError when a record that names its protocol speaks another one."""
    try:
        protocol = json.loads(data).get("protocol")
    except (ValueError, AttributeError, RecursionError):
        return  # no JSON object at all: the record's own parser says so
    if isinstance(protocol, int) and protocol != PROTOCOL:
        raise ProtocolError(
            f"{key} speaks protocol {protocol}, this composer-prime speaks {PROTOCOL}: "
            "install the version the run was created with"
        )


def read_record(store: Store, kind: type[R], key: str) -> R:
    """The record at `key`. Raises KeyMissing, or CorruptObject when no such record stands there."""
    return kind.from_bytes(read_bytes(store, key), key)


def find_record(store: Store, kind: type[R], key: str) -> R | None:
    """The record at `key`; None when there is none, or no sound one."""
    try:
        return read_record(store, kind, key)
    except (KeyMissing, CorruptObject):
        return None
