"""Containers of the loopback of Hugging Face Jobs: a real process each, in a folder and session of its own.

As in a container, the command sees its own variables only, and with it end all processes that it has started.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil

GRACE_S = 1.0
"""Between SIGTERM and SIGKILL for a job that is cancelled or ran too long."""
_MARK = "JOB_ID"


@dataclass
class Container:
    """One job's process, from before its start until after its end. `stage` and `message` are the service's words."""

    job: str
    command: Sequence[str]
    env: Mapping[str, str]
    folder: Path
    timeout_s: float
    may_start: threading.Event
    """The job stays pending until this is set."""
    stage_lag_s: float = 0.0
    """How much later than its last line the job's stage changes."""

    stage: str = "SCHEDULING"
    message: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    events: list[tuple[datetime, str]] = field(default_factory=list)
    is_log_complete: bool = False

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._verdict: tuple[str, str | None] | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"job {self.job}")
        self._thread.start()

    @property
    def is_final(self) -> bool:
        return self._over.is_set()

    def pids(self) -> list[int]:
        """Its live processes: those with its variables, also where they left its session."""
        return list(_marked(self.job))

    def end(self, stage: str, message: str | None, *, grace_s: float = GRACE_S) -> None:
        """End it with the service's words for that, unless it has ended. Returns at once."""
        with self._lock:
            if self._verdict is not None or self.is_final:
                return
            self._verdict = (stage, message)
            process = self._process
        self.may_start.set()
        if process is not None:
            if grace_s > 0:
                process.send_signal(signal.SIGTERM)
                threading.Timer(grace_s, self._kill).start()
            else:
                self._kill()

    def wait(self) -> None:
        self._over.wait()
        self._thread.join()

    def _kill(self) -> None:
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.005)

    def _live(self) -> None:
        self.may_start.wait()
        try:
            process = self._start()
            if process is not None:
                self._watch(process)
        finally:
            stage, message = self._verdict or ("ERROR", "Job failed with exit code: 128. Reason: StartError")
            self.is_log_complete = True
            time.sleep(self.stage_lag_s)
            self.finished_at = datetime.now(UTC)
            self.stage, self.message = stage, message
            self._over.set()

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._verdict is not None:  # cancelled while it was pending
                return None
            self.folder.mkdir(parents=True)
            try:
                self._process = subprocess.Popen(
                    [*self.command],
                    cwd=self.folder,
                    env={**self.env, _MARK: self.job, "HOME": str(self.folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self._print(f"exec: {error}")
                return None
            self.started_at = datetime.now(UTC)
            self.stage = "RUNNING"
            return self._process

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        limit = threading.Timer(self.timeout_s, self.end, ("ERROR", "Job timeout"))
        limit.start()
        pump = threading.Thread(target=self._read, args=(process,))
        pump.start()
        code = process.wait()
        limit.cancel()
        with self._lock:
            if self._verdict is None:
                self._verdict = _verdict(code)
        self._kill()  # a container ends with its first process
        pump.join()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._print(line.decode(errors="replace").rstrip("\n"))

    def _print(self, line: str) -> None:
        self.events.append((datetime.now(UTC), line))


def _verdict(code: int) -> tuple[str, str | None]:
    if code == 0:
        return "COMPLETED", None
    return "ERROR", f"Job failed with exit code: {code if code > 0 else 128 - code}. Reason: Error"


def _marked(job: str) -> Iterator[int]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == job and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
