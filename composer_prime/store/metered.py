"""A store that counts what passes through it, for the bytes in a site's summary and tape."""

import threading
from dataclasses import dataclass

from composer_prime.store.base import Store


@dataclass(frozen=True)
class Traffic:
    """Bytes and requests since the store was opened."""

    bytes_up: int = 0
    bytes_down: int = 0
    num_requests: int = 0


class MeteredStore:
    """A `Store` that passes every call to `inner` and counts the bytes each way. Thread-safe."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._bytes_up = self._bytes_down = self._num_requests = 0

    @property
    def uri(self) -> str:
        """The inner store's."""
        return self._inner.uri

    def traffic(self) -> Traffic:
        """What has passed so far."""
        with self._lock:
            return Traffic(self._bytes_up, self._bytes_down, self._num_requests)

    def _count(self, up: int = 0, down: int = 0) -> None:
        with self._lock:
            self._bytes_up += up
            self._bytes_down += down
            self._num_requests += 1

    def create(self, key: str, data: bytes) -> bool:
        self._count(up=len(data))
        return self._inner.create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._count(up=len(data))
        self._inner.put(key, data)

    def get(self, key: str) -> bytes:
        data = self._inner.get(key)
        self._count(down=len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._inner.get_range(key, start, length)
        self._count(down=len(data))
        return data

    def list(self, prefix: str) -> list[str]:
        self._count()
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._count()
        self._inner.delete(key)

    def close(self) -> None:
        self._inner.close()
