"""Modal on this machine: its own client and its own container program against a servicer of ours.

The servicer answers in a thread; each job is a process that runs what Modal runs in a container.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpclib.server import Server

from composer_prime.executors.base import Job
from composer_prime.executors.modal import ModalExecutor
from tests.executors.loopback_modal_calls import Call
from tests.executors.loopback_modal_servicer import TOKEN_ID, TOKEN_SECRET, Servicer
from tests.executors.platforms import Trouble
from tests.patience import PATIENCE_S


class LoopbackModal:
    """A workspace of Modal. While it is open, this process's own environment leads to it."""

    name = "modal"
    has_requests = has_queue = True
    keeps_caches = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loopback-modal")
        self._thread.start()
        self._executors: list[ModalExecutor] = []
        self.servicer, self._server, port = self._do(self._listen())
        self._url = f"http://127.0.0.1:{port}"
        self.servicer.calls.url = self._url
        self._before = {name: os.environ.get(name) for name in self.environment()}
        os.environ.update(self.environment())

    def executor(self) -> ModalExecutor:
        executor = ModalExecutor()
        self._executors.append(executor)
        return executor

    def environment(self) -> dict[str, str]:
        return {
            "MODAL_SERVER_URL": self._url,
            "MODAL_TOKEN_ID": TOKEN_ID,
            "MODAL_TOKEN_SECRET": TOKEN_SECRET,
            "MODAL_CONFIG_PATH": "/nonexistent",
        }

    def launch_option(self) -> str:
        return "modal"

    def calls(self, job: Job) -> list[Call]:
        """Every call that was made for a job, by age."""
        return [call for call in self.servicer.calls.by_id.values() if call.job_name == job.id]

    def pids(self, job: Job) -> list[int]:
        return [pid for call in self.calls(job) for container in call.containers for pid in container.job_pids()]

    def preempt(self, job: Job, *, warn: bool = True) -> None:
        """`warn`: with the interrupt and the grace that Modal gives; without, the machine is gone at once."""
        (call,) = [call for call in self.calls(job) if call.container is not None]
        self._do(self.servicer.calls.take_back(call, warn=warn))

    def trouble(self, kind: Trouble, count: int) -> None:
        self._loop.call_soon_threadsafe(self.servicer.trouble, kind, count)

    @contextmanager
    def hold_pending(self) -> Iterator[None]:
        self._loop.call_soon_threadsafe(self.servicer.calls.may_start.clear)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self.servicer.calls.may_start.set)

    def close(self) -> None:
        for executor in self._executors:
            executor.close()
        self._do(self.servicer.calls.close())
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    async def _listen(self) -> tuple[Servicer, Server, int]:
        servicer = Servicer(self._folder)
        server = Server([servicer])
        await server.start("127.0.0.1", 0)
        listening: Any = server._server
        return servicer, server, listening.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)
