"""Reads a record of somebody else's: at most so many bytes, parsed, its kind known."""

from typing import TypeVar

from composer_prime.errors import CorruptObject, KeyMissing
from composer_prime.store.base import Store
from composer_prime.sync.canonical import MAX_RECORD_BYTES, Record

R = TypeVar("R", bound=Record)


def read_bytes(store: Store, key: str) -> bytes:
    """What stands at `key`, one byte more than a record may have at most. Raises KeyMissing."""
    return store.get_range(key, 0, MAX_RECORD_BYTES + 1)


def read_record(store: Store, kind: type[R], key: str) -> R:
    """The record at `key`. Raises KeyMissing, or CorruptObject when no such record stands there."""
    return kind.from_bytes(read_bytes(store, key), key)


def find_record(store: Store, kind: type[R], key: str) -> R | None:
    """The record at `key`; None when there is none, or no sound one."""
    try:
        return read_record(store, kind, key)
    except (KeyMissing, CorruptObject):
        return None
