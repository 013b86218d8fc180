"""A store that looks like a sound one to anybody but writers who race."""

import threading
from collections import defaultdict

from composer_prime.store import keys
from composer_prime.store.obstore import MemoryStore


class Meeting(MemoryStore):
    """Checks, then writes: only writers who meet in between see that this is no create-if-absent.

    Of each key below probe/ the first `num_meeting` writers meet, and all of them win.
    """

    def __init__(self, name: str, num_meeting: int) -> None:
        super().__init__(name)
        self._num_meeting = num_meeting
        self._barriers: defaultdict[str, threading.Barrier] = defaultdict(lambda: threading.Barrier(num_meeting))
        self._lock = threading.Lock()
        self._num_came: defaultdict[str, int] = defaultdict(int)

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            self._num_came[key] += 1
            meets = key.startswith(keys.probe("")) and self._num_came[key] <= self._num_meeting
            barrier = self._barriers[key] if meets else None
        if barrier is None:
            return super().create(key, data)
        barrier.wait()
        self.put(key, data)
        return True
