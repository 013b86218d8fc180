"""A child process that can't outlive us: its own process group, its output in a log, an end with a grace.

Supervisors start roles with it, and a role that needs a server of its own (vLLM) starts that with it too, so that a
SIGKILL anywhere up the tree takes down everything below (on Linux; see `_TIED`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from composer_prime import redaction
from composer_prime.errors import BadInput, ComposerPrimeError, ProcessCrashed, SiteRevoked, SystemRefused

TAIL_LINES = 20
QUIET_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
"""For every process of ours: one thread (two on two busy cores are 10 to 20 times slower), a log that isn't late."""

DRAIN_S = 5.0
"""So long what an ended process has written may take to its log, where secrets are cut out on the way."""

_TAIL_BYTES = 64 * 1024
_POLL_S = 0.05
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Runs between fork and the command. PR_SET_PDEATHSIG (1) survives execve and fires when the *thread* that started us
# ends, so children are started from a thread that lives as long as they do. Not a preexec_fn: Python 3.12 warns
# about those in a process with threads. Systems without prctl (macOS) cover orderly ends only.
_TIED = """
import ctypes, os, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, int(sys.argv[2]), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Child:
    """One running process with stdout and stderr appended to `log`; it has started when the constructor returns.

    A process of its own cuts secrets out between the output and the log, and spells control characters: one of its own,
    since a child may have to write after we are gone. It ends when nobody can write any more.

    role     what people call it in messages: "trainer".
    command  argv; looked up on PATH.
    env      added to (and winning over) our own environment.
    stdout   where stdout goes instead of the log, for a command whose output is an answer.
    umask    of its own; -1: ours.
    orphan   the signal it gets when we are gone without having ended it; SIGTERM for one that ends its own children.
    """

    def __init__(
        self,
        role: str,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str],
        stdout: Path | None = None,
        umask: int = -1,
        orphan: signal.Signals = signal.SIGKILL,
    ) -> None:
        self.role = role
        self.log = log
        self._group_ended = False
        self._redaction: subprocess.Popen[bytes] | None = None
        environment = {**os.environ, **env}
        log.parent.mkdir(parents=True, exist_ok=True)
        launch = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), str(int(orphan)), *command]
        with contextlib.ExitStack() as files:
            log_file = files.enter_context(log.open("ab"))
            self.log_start = log_file.tell()
            self._redaction = _start_redaction(log_file, environment)
            assert self._redaction.stdin is not None
            log_file = files.enter_context(self._redaction.stdin)
            out_file = files.enter_context(stdout.open("wb")) if stdout else log_file
            self._process = subprocess.Popen(
                launch,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=log_file,
                env=environment,
                umask=umask,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code (negative: the signal that killed it), or None while it runs.

        Once it has ended, whatever it left behind in its process group is killed, and its log is whole.
        """
        code = self._process.poll()
        if code is not None and not self._group_ended:
            self._group_ended = True
            self._signal_group(signal.SIGKILL)
            self._end_redaction()
        return code

    def wait(self, timeout_s: float) -> int | None:
        """As `poll`, after waiting up to `timeout_s` seconds for the end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.poll()

    def terminate(self) -> None:
        """Ask it, and only it, to end (SIGTERM): it ends its own children in its own order."""
        if self.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it and its process group now (SIGKILL), and reap it."""
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()
            self.poll()

    def tail(self, num_lines: int = TAIL_LINES) -> list[str]:
        """The last non-empty lines that this process (not an earlier one) wrote to its log."""
        return tail(self.log, num_lines, start=self.log_start)

    def _end_redaction(self) -> None:
        """Wait until the log is whole; what was left behind elsewhere and still writes loses its output."""
        if self._redaction is None:
            return
        try:
            self._redaction.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            self._redaction.kill()
            self._redaction.wait()

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM for a group of zombies
            os.killpg(self._process.pid, number)


def _start_redaction(log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """What passes its standard input on to `log` without the secrets of `environment`, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-I", redaction.__file__],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        bufsize=0,
        env=dict(environment),
        start_new_session=True,
    )


def stop(children: Iterable[Child], grace_s: float) -> None:
    """SIGTERM to all of them, then up to `grace_s` seconds for them together, then SIGKILL to their groups."""
    children = list(children)
    for child in children:
        child.terminate()
    deadline = time.monotonic() + grace_s
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))
        child.kill()


def answer_of(
    role: str,
    command: Sequence[str],
    log: Path,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
    umask: int = -1,
) -> str | None:
    """What a process prints until it ends with exit code 0; None when `is_stopped` says so first, and it is killed.

    Raises the process's `failure`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    # A file of its own: another site of this folder may start at this moment.
    with tempfile.NamedTemporaryFile(prefix=f"{role}-", suffix=".out", dir=log.parent) as answer:
        child = Child(role, command, log, env=QUIET_ENV, stdout=Path(answer.name), umask=umask)
        try:
            while (code := child.poll()) is None:
                if is_stopped():
                    return None
                time.sleep(_POLL_S)
        finally:
            child.kill()
        if code != 0:
            raise failure(child, code)
        return Path(answer.name).read_text(encoding="utf-8")


def failure(child: Child, exit_code: int) -> ComposerPrimeError:
    """The error of a process that ended when it shouldn't have.

    With exit code 2, bad input, or 74, refused by the system, its last line is the message; else its last log lines are
    for whoever debugs it.
    """
    if exit_code not in (BadInput.exit_code, SystemRefused.exit_code):
        lines = "\n".join(f"    {line}" for line in child.tail())
        return ProcessCrashed(f"{child.role} ended with {describe_exit(exit_code)}; the end of {child.log}:\n{lines}")
    last = child.tail(1) or ["it gave no reason"]
    said = last[0].removeprefix("error: ")
    if said.startswith(SiteRevoked.OPENING):
        return SiteRevoked(said)
    return (SystemRefused if exit_code == SystemRefused.exit_code else BadInput)(f"{child.role}: {said}")


def tail(log: Path, num_lines: int, start: int = 0) -> list[str]:
    """The last non-empty lines of a log file at or after byte `start`; of one that isn't there, none."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-num_lines:]


def describe_exit(code: int) -> str:
    """An exit code in words: "exit code 3", "killed by SIGKILL"."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Interrupt:
    """Whether somebody wants us to stop: Ctrl-C as a flag, so that nothing is cut off while it starts a process."""

    def __init__(self) -> None:
        self.is_set = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler: the first asks, the second insists (KeyboardInterrupt)."""
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextlib.contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """SIGINT, SIGTERM and, unless nohup has it ignored, SIGHUP go to the flag while inside.

    Main thread only, as Python's signals are.
    """
    interrupt = Interrupt()
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {number: signal.signal(number, interrupt.handle) for number in _INTERRUPTS if number not in ignored}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
