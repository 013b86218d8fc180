"""This machine as its own loopback: only the state folder is the test's."""

import os
import signal
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import psutil

from composer_prime.executors import shim
from composer_prime.executors.base import Executor, Job
from composer_prime.executors.local import STATE_VARIABLE, LocalExecutor
from tests.executors.platforms import Trouble
from tests.patience import PATIENCE_S


class LocalPlatform:
    """Jobs below a folder of the test's own; they end soon after they are told to."""

    name = "local"
    has_requests = has_queue = False
    keeps_caches = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def executor(self) -> Executor:
        return LocalExecutor(self._folder, grace_s=1.0)

    def environment(self) -> dict[str, str]:
        return {STATE_VARIABLE: str(self._folder)}

    def launch_option(self) -> str:
        return "local"

    def pids(self, job: Job) -> list[int]:
        return shim.job_processes(self._job_folder(job))

    def preempt(self, job: Job) -> None:
        """As when the machine loses its power: everything at once, without a word."""
        state = shim.read_state(self._job_folder(job))
        assert state is not None and state["state"] == "running", state
        pids = [state["keeper"], *shim.job_processes(self._job_folder(job), state["keeper"])]
        processes = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(pid))
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert not alive

    def trouble(self, kind: Trouble, count: int) -> None:
        raise AssertionError("a machine that starts its own jobs has no requests that could fail")

    def hold_pending(self) -> AbstractContextManager[None]:
        raise AssertionError("a machine that starts its own jobs has no queue")

    def close(self) -> None:
        for state in self._folder.glob("jobs/*/*/*/state.json"):
            shim.cancel(str(self._folder), "/".join(state.parts[-4:-1]), PATIENCE_S)

    def _job_folder(self, job: Job) -> str:
        return str(self._folder / "jobs" / job.run / job.site / str(job.attempt))
