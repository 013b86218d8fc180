"""Watches, beside a site that trains, for what the volunteer asked: a pause, an end after some hours, a limit of disk.

It ends the site as Ctrl-C would: by a signal to this process, once the site's own handler is there, which lets the
trainer save and say goodbye. So whatever runs the site needs to know nothing of volunteers.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from enum import Enum
from types import TracebackType

from composer_prime.volunteers.folder import VolunteerFolder

LOOK_S = 0.5
DISK_LOOK_S = 30.0


class Reason(Enum):
    """Why the warden ended the site."""

    PAUSED = "paused"
    TIME = "the hours you gave are over"
    DISK = "the disk you lent is full"


class Warden:
    """A thread, from `with` to its end. It ends a site only between `watch` and `rest`, once."""

    def __init__(
        self,
        folder: VolunteerFolder,
        *,
        hours: float | None = None,
        max_disk_bytes: int | None = None,
        end: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        self._folder = folder
        self._until = None if hours is None else time.monotonic() + 3600 * hours
        self._max_disk_bytes = max_disk_bytes
        self._end = end
        self._lock = threading.Lock()
        self._watching = False
        self._handler_before: object = None
        self._stopped = threading.Event()
        self._disk_looked_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="warden", daemon=True)
        self.reason: Reason | None = None
        """Why the site that was watched last was ended; None: it wasn't, by us."""

    def __enter__(self) -> "Warden":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def watch(self) -> None:
        """A site is about to start, and will listen to signals."""
        with self._lock:
            self._watching, self.reason = True, None
            self._handler_before = signal.getsignal(signal.SIGTERM)

    def rest(self) -> None:
        """It has ended; no signal comes any more."""
        with self._lock:
            self._watching = False

    @property
    def is_over(self) -> bool:
        """Whether the volunteer's hours are."""
        return self._until is not None and time.monotonic() >= self._until

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            reason = self._look()
            with self._lock:
                if reason is not None and self._watching and self._is_heard():
                    self._watching, self.reason = False, reason
                    self._end()

    def _is_heard(self) -> bool:
        """Whether the site has put its own handler in place: before, nobody would hear the signal."""
        return signal.getsignal(signal.SIGTERM) != self._handler_before

    def _look(self) -> Reason | None:
        if self.is_over:
            return Reason.TIME
        if self._folder.is_paused:
            return Reason.PAUSED
        if self._max_disk_bytes is not None and time.monotonic() - self._disk_looked_at >= DISK_LOOK_S:
            self._disk_looked_at = time.monotonic()
            if self._folder.used_bytes() > self._max_disk_bytes:
                return Reason.DISK
        return None
