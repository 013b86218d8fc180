"""A site's place in a storm: its folder, its gate, and the process that lives there now, started again when it dies."""

from dataclasses import dataclass, field
from pathlib import Path
import json
import os

from composer_prime.bench.storm_faults import signal_process
from composer_prime.bench.storm_gate import Gate
from composer_prime.bench.storm_nursery import Nursery

STORE_DOWN = 3
"""Exit code of a site that couldn't reach the store when it started (`storm_site.STORE_DOWN`)."""
TAIL_BYTES = 4096


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

    def signal(self, number: int) -> None:
        """Send a signal to the process here."""
        if self.pid is not None:
            self.killed = self.killed or number == 9
            signal_process(self.pid, number)

    def release(self) -> None:
        """A fault is over."""
        self.is_hit = False

    def ended(self, code: int, now: float) -> None:
        """Its process has ended: it is started again unless it was to end."""
        self.pid = None
        if code == 0:
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
        path = self.folder / "book.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
        for line in reversed(lines):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if "versions" in found:
                return found["versions"]
        return []
