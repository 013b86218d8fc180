"""A store in this process's memory, for tests and simulations.

`memory://name` opens the same bytes wherever it is opened in the process, and `memory://name/prefix` a part of them,
as buckets and prefixes do. Nothing outlives the process.
"""

import threading

from composer_prime.errors import ConfigError, KeyMissing
from composer_prime.store.base import check_create, check_key, check_prefix, check_range


class _Bucket:
    """The objects of one name, and the lock every access holds."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}


_buckets: dict[str, _Bucket] = {}
_buckets_lock = threading.Lock()


class MemoryStore:
    """Store over a dict; see `composer_prime.store.base.Store` for what the methods promise."""

    def __init__(self, name: str, prefix: str = "") -> None:
        """Open the bucket `name`, made when it is new; keys lie under `prefix` ('' or a path without outer slashes).

        ConfigError when the name is empty.
        """
        if not name:
            raise ConfigError("store URI ('memory://') names no bucket: write memory://name")
        self.uri = f"memory://{name}/{prefix}".rstrip("/")
        self._folder = f"{prefix}/" if prefix else ""
        with _buckets_lock:
            self._bucket = _buckets.setdefault(name, _Bucket())

    def create(self, key: str, data: bytes) -> bool:
        check_create(key, data)
        data = bytes(data)
        with self._bucket.lock:
            return self._bucket.objects.setdefault(self._folder + key, data) == data

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        with self._bucket.lock:
            self._bucket.objects[self._folder + key] = bytes(data)

    def get(self, key: str) -> bytes:
        check_key(key)
        with self._bucket.lock:
            data = self._bucket.objects.get(self._folder + key)
        if data is None:
            raise KeyMissing(f"no object at {key} in {self.uri}")
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(key, start, length)
        return self.get(key)[start : start + length]

    def list(self, prefix: str) -> list[str]:
        check_prefix(prefix)
        with self._bucket.lock:
            keys = list(self._bucket.objects)
        return sorted(k.removeprefix(self._folder) for k in keys if k.startswith(self._folder + prefix))

    def delete(self, key: str) -> None:
        check_key(key)
        with self._bucket.lock:
            self._bucket.objects.pop(self._folder + key, None)

    def close(self) -> None:
        """Nothing to let go of."""
