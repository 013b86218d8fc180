"""What the outer loop asks of a bucket: bytes at keys, and one atomic act, create-if-absent.

Every backend passes tests/contracts/test_store_contract.py. What is the same for all of them (which keys are legal,
how large a conditional write may be) is checked here, so that no backend differs.
"""

import re

from composer_prime.errors import StoreError

MAX_CREATE_BYTES = 64 * 2**20
"""Largest object `create` takes: conditional writes are single-part, and multipart ones are not portable."""

MAX_KEY_LENGTH = 512
"""Characters; S3 allows 1,024 bytes for the store's prefix and the key together."""

_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
_PREFIX = re.compile(rf"(?:{_SEGMENT}/)*(?:{_SEGMENT})?")


def is_key(key: str) -> bool:
    """True when every backend can hold an object at `key`."""
    return len(key) <= MAX_KEY_LENGTH and _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """Return `key` when every backend can hold it, else raise StoreError (keys may come out of others' records)."""
    if not is_key(key):
        raise StoreError(
            f"key ({key[:80]!r}, {len(key)} characters) must be at most {MAX_KEY_LENGTH} characters of ASCII letters, "
            "digits, '_', '.', '-' in segments joined by '/', none empty or starting with '.' or '-': "
            "spell keys with composer_prime.store.keys"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` when a legal key can start with it, else raise StoreError."""
    if len(prefix) > MAX_KEY_LENGTH or not _PREFIX.fullmatch(prefix):
        raise StoreError(
            f"prefix ({prefix[:80]!r}) must be the beginning of a key: "
            "spell prefixes with composer_prime.store.keys, or pass '' to list everything"
        )
    return prefix


class Store:
    """Bytes at keys. Synchronous; one instance may be used by many threads at once.

    A key is ASCII segments joined by '/', each starting with a letter, digit or underscore, so '..', an absolute
    path and a hidden file can't be spelled. No key may be the folder of another ('a' and 'a/b'): a file system
    can't hold both. A write is seen by every reader as soon as it returns, whole or not at all.

    Every method raises StoreError when the store fails (StoreUnusable when it can't be reached or its credentials
    are refused), with the store's URI, the cause and a remedy.
    """

    uri: str
    """Names the store; `open_store(uri)` opens it again."""
    is_guarded = False
    """Whether somebody decides what we may do there, so that writing to it is no way to try it."""

    # By these a backend says where the bytes go; their keys are legal.

    def _create(self, key: str, data: bytes) -> bool:
        raise NotImplementedError

    def _put(self, key: str, data: bytes | memoryview) -> None:
        raise NotImplementedError

    def _read(self, key: str, span: tuple[int, int] | None) -> bytes:
        """All bytes, or those of (start, length)."""
        raise NotImplementedError

    def _list(self, prefix: str) -> list[str]:
        """Names among which are all that start with `prefix`."""
        raise NotImplementedError

    def _delete(self, key: str) -> None:
        raise NotImplementedError

    def create(self, key: str, data: bytes) -> bool:
        """Write `data` at `key` unless something is there: exactly one of several racing writers wins.

        True   `data` stands at `key`: this call put it there, or found the same bytes (its own first try, retried).
        False  other bytes were there first; they stay.

        StoreError when `data` is larger than MAX_CREATE_BYTES.
        """
        check_key(key)
        if len(data) > MAX_CREATE_BYTES:
            raise StoreError(
                f"create of {key} with {len(data)} bytes: at most {MAX_CREATE_BYTES} (64 MiB) can be written "
                "conditionally; put the bytes at a content-addressed key and create a record that names it"
            )
        return self._create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write `data` at `key`, over what was there; a concurrent reader gets the old bytes or the new ones."""
        self._put(check_key(key), data)

    def get(self, key: str) -> bytes:
        """All bytes at `key`; KeyMissing when there is no object (a folder is none).

        However many they are: of what somebody else may have written read a range, up to a limit.
        """
        return self._read(check_key(key), None)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Up to `length` bytes from offset `start`: fewer, or none, past the end. KeyMissing as `get`."""
        check_key(key)
        if start < 0 or length < 0:
            raise StoreError(f"range of {key} (start {start}, length {length}): both must be 0 or more")
        return self._read(key, (start, length))

    def list(self, prefix: str) -> list[str]:
        """All keys that start with the string `prefix` (not only whole folders), sorted; '' lists everything.

        Foreign objects, whose names are no legal keys, are left out.
        """
        names = self._list(check_prefix(prefix))
        return sorted(name for name in names if name.startswith(prefix) and is_key(name))

    def delete(self, key: str) -> None:
        """Remove the object at `key`; nothing happens when there is none."""
        self._delete(check_key(key))

    def introduce(self) -> None:
        """Make first contact: StoreUnusable when nobody answers, or when we aren't let in."""

    def close(self) -> None:
        """Let go of connections and threads; may be called twice. The bytes stay."""
