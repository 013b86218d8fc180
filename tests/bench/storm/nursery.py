"""Forks a storm's sites from one process that has imported all they need, so that a restart costs no imports.

It starts no thread and opens no connection before it forks; whoever started it asks for sites over a socket.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_prime.errors import SiteError
from composer_prime.sites.embedded.processes import QUIET_ENV, Child

IMPORT_S = 120.0
"""Longest that imports may take."""


class Nursery:
    """A nursery's process as the storm sees it. Start it on the thread that outlives it.

    import_s   seconds from its start until it could fork: what every site would pay on its own
    """

    def __init__(self, folder: Path) -> None:
        started = time.monotonic()
        self._socket = socket.socket(socket.AF_UNIX)
        self._place = tempfile.TemporaryDirectory(prefix="storm-")  # a socket's path must be short
        place = Path(self._place.name) / "nursery"
        command = [sys.executable, "-m", __name__, str(place)]
        self._child = Child("nursery", command, folder / "nursery.log", env=QUIET_ENV)
        while not place.exists() or self._socket.connect_ex(str(place)) != 0:
            if self._child.poll() is not None or time.monotonic() - started > IMPORT_S:
                raise SiteError("the nursery didn't start:\n" + "\n".join(self._child.tail()))
            time.sleep(0.05)
        self.import_s = time.monotonic() - started
        self._lines = self._socket.makefile("rw")

    def start(self, config: Path, log: Path) -> int:
        """Fork a site; returns its process id."""
        return self._ask({"config": str(config), "log": str(log)})["pid"]

    def ended(self) -> list[tuple[int, int]]:
        """(process id, exit code or minus the signal) of each site that ended since the last call."""
        return [(pid, code) for pid, code in self._ask({})["ended"]]

    def close(self) -> None:
        """Kill all that is left."""
        self._child.kill()
        self._lines.close()
        self._socket.close()
        self._place.cleanup()

    def _ask(self, question: dict[str, str]) -> dict[str, Any]:
        self._lines.write(json.dumps(question) + "\n")
        self._lines.flush()
        answer = self._lines.readline()
        if not answer:
            raise SiteError("the nursery ended:\n" + "\n".join(self._child.tail()))
        return json.loads(answer)


def _serve(listener: socket.socket, run_site: Callable[[Path], int]) -> None:
    """Answer until the other end is gone, then take all sites along."""
    connection, _ = listener.accept()
    children: set[int] = set()
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            question = json.loads(line)
            if question:
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    connection.close()
                    _live(question, run_site)
                children.add(pid)
                answer: dict[str, Any] = {"pid": pid}
            else:
                answer = {"ended": _reap(children)}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _live(question: dict[str, str], run_site: Callable[[Path], int]) -> None:
    """The forked process: a site from its start to its end, never to return."""
    code = 1
    try:
        _die_with_parent()
        log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = run_site(Path(question["config"]))
    except BaseException:  # this process ends here whatever it was: its own log must say why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap(children: set[int]) -> list[tuple[int, int]]:
    ended = []
    for pid in list(children):
        with contextlib.suppress(ChildProcessError):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                children.discard(pid)
                ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def _die_with_parent() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, int(signal.SIGKILL), 0, 0, 0)


def main(place: Path) -> None:
    """Import, then serve."""
    import composer_prime.store.obstore  # noqa: F401  (sites open their stores lazily)
    from tests.bench.storm.site import run_site

    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        _serve(listener, run_site)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
