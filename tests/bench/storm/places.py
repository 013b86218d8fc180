"""A site's place in a storm: its folder, its gate, and the process that lives there now, started again when it dies."""

import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.storm.book import STORE_DOWN, has_merged, newest_versions
from tests.bench.storm.gate import Gate
from tests.bench.storm.nursery import Nursery


@dataclass
class Start:
    """One process of a site. `cause`: first, late, killed, store down, crashed."""

    at: float
    pid: int
    cause: str


@dataclass
class Place:
    """One site's place. Mutated by the storm's main thread only."""

    name: str
    folder: Path
    gate: Gate
    config: Path
    nursery: Nursery
    pid: int | None = None
    starts: list[Start] = field(default_factory=list)
    is_hit: bool = False
    is_leaving: bool = False
    killed: bool = False
    """By the storm, and not started again yet."""
    done: bool = False
    """It left, or the run ended."""
    start_at: float | None = None
    """When it is to be started again."""
    why: str = "first"
    down: list[tuple[float, float]] = field(default_factory=list)
    """When it couldn't take part, through no fault of its own."""
    crashes: list[str] = field(default_factory=list)

    @property
    def is_down(self) -> bool:
        """Killed, and not up again."""
        return self.pid is None or self.killed

    def start(self, now: float) -> None:
        """Start a process here."""
        self.pid = self.nursery.start(self.config, self.folder / "site.log")
        self.starts.append(Start(now, self.pid, self.why))
        self.start_at, self.killed = None, False

    def send(self, number: int) -> None:
        """Send a signal to the process here."""
        if self.pid is not None:
            self.killed = self.killed or number == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):  # it just ended
                os.kill(self.pid, number)

    def release(self) -> None:
        """A fault is over."""
        self.is_hit = False

    def ended(self, code: int, now: float) -> None:
        """Its process has ended: it is started again unless it was to end."""
        self.pid = None
        if code == 0 or self.is_leaving:
            self.done = True
            return
        if self.killed:
            self.why, self.start_at = "killed", now
        elif code == STORE_DOWN:
            self.why, self.start_at = "store down", now + 0.5
        else:
            self.crashes.append(f"exit code {code}")
            self.why, self.start_at = "crashed", now + 0.5

    def versions(self) -> list[int]:
        """The open round of each fragment, as its book last says; none before it joined."""
        return newest_versions(self.folder)

    def is_able(self) -> bool:
        """Whether something may happen to it: it takes part, nothing else has hit it, and it is over the last hit."""
        if self.pid is None or self.killed or self.is_hit or self.is_leaving or self.done:
            return False
        return has_merged(self.folder, self.pid)
