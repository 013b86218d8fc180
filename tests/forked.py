"""Python processes that begin with torch imported: each is forked from one that has it, which else takes them seconds.

That process has no thread and no connection; each fork has a process id, environment, path and output of its own.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch._dynamo", "tests.sync.ranked_site"])  # fully_shard imports the former


class Program:
    """`python -m module *arguments`, started when the constructor returns; its output goes to `log`."""

    def __init__(self, module: str, arguments: list[str], environment: Mapping[str, str], log: Path) -> None:
        command = [module, *arguments]
        self.log = log
        self._process = PROCESSES.Process(target=_run, args=(command, dict(environment), str(log)), daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that killed it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()


def _run(command: list[str], environment: dict[str, str], log: str) -> None:
    """The program, in its own process."""
    gc.freeze()  # what was imported before the fork is no garbage of ours
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = list(dict.fromkeys([*filter(None, path), *sys.path]))
    sys.argv[:] = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
