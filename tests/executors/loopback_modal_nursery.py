"""Starts containers of the loopback Modal by forking one process that has imported Modal's client, which takes longer
than most jobs.

That process, this file run as a program, makes no client, no thread and no connection. Each fork is as a process
started anew would be: a session, environment, folder and output of its own, also in what /proc says of its start.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

MARK = "COMPOSER_PRIME_LOOPBACK_CONTAINER"
BLANK = "-" * 25
"""The mark of the process that is forked; a container writes its own over it, which is as long."""
PROGRAM = "modal._container_entrypoint"
_LIMIT = 2**20


def marked_pids(task_id: str) -> list[int]:
    """Live processes of a container."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if _is_marked(folder, task_id):
                    found.append(int(folder.name))
    return found


def _is_marked(folder: Path, task_id: str) -> bool:
    return f"{MARK}={task_id}".encode() in (folder / "environ").read_bytes().split(b"\0")


@dataclass(frozen=True)
class Birth:
    """What a container begins with, besides its output."""

    task_id: str
    folder: str
    environment: Mapping[str, str]


class Nursery:
    """The process that is forked, as the loopback sees it. Ends, with all containers, when this process does."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Modal's client looks at these when it is imported.
        environment = {"MODAL_IS_REMOTE": "1", "MODAL_CONFIG_PATH": "/nonexistent", MARK: BLANK}
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=kept | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def start(self, birth: Birth, output: int) -> socket.socket:
        """Start a container that writes into `output`. What is returned receives its process id, then its exit code."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._control, [json.dumps(asdict(birth)).encode()], [output, theirs.fileno()])
        return ours

    def close(self) -> None:
        # Also where something else that we started holds a copy of it.
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        self._process.wait()


@functools.cache
def nursery() -> Nursery:
    """One for all workspaces of this process, started when the first container is."""
    started = Nursery()
    atexit.register(started.close)
    return started


@dataclass(frozen=True)
class _Child:
    pid: int
    task_id: str
    watcher: socket.socket

    def bury(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        with self.watcher, suppress(OSError):  # nobody may be listening any more
            self.watcher.send(str(os.waitstatus_to_exitcode(status)).encode())

    def kill(self) -> None:
        """With what it has started."""
        os.kill(self.pid, signal.SIGKILL)
        while pids := marked_pids(self.task_id):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _serve(control: socket.socket) -> Birth | None:
    """Fork until nobody can ask any more: None then; in a fork, what it is to be."""
    children: dict[int, _Child] = {}  # by a descriptor that is readable when the child has ended
    while True:
        ready, _, _ = select.select([control.fileno(), *children], [], [])
        for ended in children.keys() & set(ready):
            children.pop(ended).bury()
            os.close(ended)
        if control.fileno() not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, _LIMIT, 2)
        if not message:
            for child in children.values():
                child.kill()
            return None
        birth = Birth(**json.loads(message))
        output, watcher = descriptors[0], socket.socket(fileno=descriptors[1])
        pid = os.fork()
        if pid == 0:
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            os.close(output)
            for sibling, child in children.items():
                os.close(sibling)
                child.watcher.close()
            watcher.close()
            return birth
        os.close(output)
        children[os.pidfd_open(pid)] = _Child(pid, birth.task_id, watcher)
        with suppress(OSError):
            watcher.send(str(pid).encode())


def _become(birth: Birth) -> None:
    """Be the process that `python -m modal._container_entrypoint` in that folder and environment would be."""
    os.setsid()
    _write_over_mark(birth.task_id)
    os.environ.clear()
    os.environ.update(birth.environment)
    os.chdir(birth.folder)
    places = [birth.folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:0] = filter(None, places)
    # Not inherited from whoever started us: a shell has what it starts in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)


def _write_over_mark(task_id: str) -> None:
    """In the memory that /proc/<pid>/environ shows, which a fork has from its parent and hands on to its own."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if len(task_id) != len(BLANK):
        raise ValueError(f"task id {task_id!r} must have {len(BLANK)} characters")
    ctypes.memmove(getenv(MARK.encode()), task_id.encode(), len(BLANK))
    if not _is_marked(Path("/proc/self"), task_id):
        raise RuntimeError(f"/proc/self/environ doesn't show what was written over {MARK}")


def main(control_fd: int) -> None:
    """Import what a container imports, then serve."""
    del sys.path[0]  # this file's folder
    for name in (PROGRAM, "urllib.request"):  # the second is what its first connection imports
        importlib.import_module(name)
    # Only imported so far; what is to run in each container runs there.
    del sys.modules[PROGRAM]
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=control_fd) as control:
        birth = _serve(control)
    if birth is not None:
        _become(birth)


if __name__ == "__main__":
    main(int(sys.argv[1]))
