"""What a process waits for: whoever waits says so in one place, and it is told once it has lasted WAIT_S.

It is told to a file of the site, which its screen reads, and to a listener: the event log. Standard library only.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

WAIT_S = 30.0
KINDS = ("store", "engine", "rollouts", "round", "batch")
"""Of waits at the same time the first is told: it is the others' cause."""


@dataclass(frozen=True)
class Waiting:
    """A wait, its times in Unix seconds; `until` is None while it lasts."""

    cause: str
    since: float
    until: float | None = None

    def __str__(self) -> str:
        dates = [time.strftime("%FT%TZ", time.gmtime(at)) for at in (self.since, self.until) if at is not None]
        return f"since {' until '.join(dates)}: {self.cause}"


class Waits:
    """The waits of one process. Thread-safe. `clock` measures them, `wall` dates them."""

    def __init__(
        self,
        path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._clock, self._wall = path, clock, wall
        self._lock = threading.RLock()
        self._begun: dict[str, tuple[float, str]] = {}
        self._told: tuple[tuple[float, str], Waiting] | None = None
        self.listener: Callable[[Waiting], object] = lambda waiting: None

    def say(self, kind: str, cause: str | None, since: float | None = None) -> None:
        """This kind waits for `cause`, since it first said so or the clock's `since`; None: it goes on. Call often."""
        with self._lock:
            now = self._clock()
            begun = self._begun.pop(kind, (now if since is None else since, ""))[0]
            if cause is not None:
                self._begun[kind] = begun, cause
            lasting = [self._begun[each] for each in KINDS if each in self._begun]
            current = next((wait for wait in lasting if now - wait[0] >= WAIT_S), None)
            if current is None and self._told is not None:
                self._tell(replace(self._told[1], until=self._wall()))
                self._told = None
            elif current is not None and (self._told is None or self._told[0] != current):
                self._told = current, Waiting(current[1], self._wall() - (now - current[0]))
                self._tell(self._told[1])

    def _tell(self, waiting: Waiting) -> None:
        self.listener(waiting)
        if self._path is not None:
            with contextlib.suppress(OSError):  # a full disk may be what is waited for
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(json.dumps(asdict(waiting)), encoding="utf-8")


def read_waiting(path: Path) -> Waiting | None:
    """The wait that a process tells of and that still lasts."""
    with contextlib.suppress(FileNotFoundError, ValueError):  # none yet, or it is being written
        waiting = Waiting(**json.loads(path.read_text(encoding="utf-8")))
        return waiting if waiting.until is None else None
    return None
