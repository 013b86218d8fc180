"""A store that keeps what was read, for whoever will soon read it again over a slow link."""

import threading

from composer_prime.store.base import Store
from composer_prime.store.metered import MeteredStore

Place = tuple[str, int, int]
"""Key, start, and length asked for."""


class RememberingStore(MeteredStore):
    """A `Store` whose ranges can be had again from `recalled()`, in memory: those that `keep` said were sound.

    Only for keys whose content never changes. `keep` is called between reads, `forget` by any thread at any time.
    """

    def __init__(self, inner: Store, most_nbytes: int) -> None:
        """most_nbytes: what is kept at most; what is more is read again."""
        super().__init__(inner)
        self._most_nbytes = most_nbytes
        self._nbytes = 0
        self._lock = threading.Lock()
        self._fresh: dict[Place, bytes] = {}
        self._kept: dict[Place, bytes] | None = {}

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = super().get_range(key, start, length)
        with self._lock:
            if self._kept is not None:
                self._fresh[key, start, length] = data
        return data

    def keep(self) -> None:
        """What was read since the last call was what it should be."""
        with self._lock:
            fresh, self._fresh = self._fresh, {}
            nbytes = sum(map(len, fresh.values()))
            if self._kept is not None and self._nbytes + nbytes <= self._most_nbytes:
                self._kept.update(fresh)
                self._nbytes += nbytes

    def forget(self) -> None:
        """Keep nothing from now on."""
        with self._lock:
            self._fresh, self._kept = {}, None

    def recalled(self) -> Store:
        """The same store, which serves what is kept from memory."""
        return _Recalled(self._inner, self._kept or {})


class _Recalled(MeteredStore):
    def __init__(self, inner: Store, kept: dict[Place, bytes]) -> None:
        super().__init__(inner)
        self._kept = kept

    def get_range(self, key: str, start: int, length: int) -> bytes:
        known = self._kept.get((key, start, length))
        return super().get_range(key, start, length) if known is None else known
