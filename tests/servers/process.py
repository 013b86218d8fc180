"""Start a server, wait until it answers, and leave nothing of it behind.

The server leads a process group that is killed at the end, and on Linux the kernel kills it as well when the thread
that started it dies, so that not even a killed pytest leaves an orphan.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.patience import PATIENCE_S

DIE_WITH_PARENT = """
import ctypes, os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that wanted this server is gone")
os.execv(command[0], command)
"""
"""Program text for `python -c` with this process's id and a command: it asks for SIGKILL at the parent's death, which
lasts over exec, then becomes the command. A hook between fork and exec would do so too, but is unsafe with threads."""


class ServerFailed(Exception):
    """A server ended, or did not answer in time; the message holds the last lines of its log."""


@contextmanager
def serving(
    command: Sequence[str | Path],
    *,
    log: Path,
    is_ready: Callable[[], bool],
    environment: Mapping[str, str],
    folder: Path,
    deadline_s: float = PATIENCE_S,
) -> Iterator[int]:
    """Run `command` (its program given by path) in `folder` until the block ends; yields its process id once ready.

    is_ready      asked every 50 ms; must not raise.
    environment   added to this process's own.

    ServerFailed when the server ends or isn't ready after `deadline_s`.
    """
    trampoline = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid())]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*trampoline, *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=folder,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + deadline_s
        while not is_ready():
            if process.poll() is not None:
                raise ServerFailed(f"{command[0]} ended with code {process.returncode}:\n{_last_lines(log)}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"{command[0]} was not ready after {deadline_s} s:\n{_last_lines(log)}")
            time.sleep(0.05)
        yield process.pid
    finally:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the server and whatever it started. The group outlives its leader until we have waited for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_lines(log: Path, count: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
