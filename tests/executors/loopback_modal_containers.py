"""Containers of the loopback Modal: each runs Modal's own container program as a process, and dies whole.

A real container is a namespace: when it goes, everything in it goes. Here all its processes carry a mark in their
environment, and are found by it.
"""

import asyncio
import codecs
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from modal_proto import api_pb2 as api

from tests.executors.loopback_modal_nursery import MARK, Birth, marked_pids, nursery

TASK_HEADER = "x-loopback-task"
MESSAGE_BYTES = 64
"""Longest message of who starts containers: a process id, or an exit code."""
_KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "PYTHONPATH", "OMP_NUM_THREADS", "VIRTUAL_ENV")
"""What a job sees of this machine's environment, as if it were in its image; nothing that could be a secret."""


class Container:
    """One container, for one input."""

    def __init__(self, task_id: str, folder: Path, on_output: Callable[[str], None]) -> None:
        self.task_id = task_id
        self.output: api.FunctionPutOutputsItem | None = None
        self.exit_code: int | None = None
        self.init_failure: api.GenericResult | None = None
        self.input_taken = asyncio.Event()
        self._folder = folder
        self._on_output = on_output
        self._pid: int | None = None
        self._has_ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self, url: str, arguments: api.ContainerArguments, secrets: Mapping[str, str], programs: Path | None
    ) -> None:
        """programs: the folder of its image's; None: this machine's."""
        self._folder.mkdir(parents=True, exist_ok=True)
        written = self._folder / f"{self.task_id}.pb"
        written.write_bytes(arguments.SerializeToString())
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self._folder), kept.get("PYTHONPATH")]))
        if programs is not None:
            kept |= {"PATH": f"{programs}:{os.defpath}", "PYTHONPATH": str(self._folder)}
            kept.pop("VIRTUAL_ENV", None)
        environment = {
            **kept,
            **secrets,
            "MODAL_IS_REMOTE": "1",
            "MODAL_SERVER_URL": url,
            "MODAL_TASK_ID": self.task_id,
            "MODAL_CONTAINER_ARGUMENTS_PATH": str(written),
            "MODAL_CONFIG_PATH": "/nonexistent",
            "MODAL_OVERRIDE_HEADERS": f"{TASK_HEADER}:{self.task_id}",
            MARK: self.task_id,
        }
        loop = asyncio.get_running_loop()
        output, theirs = os.pipe()
        watcher = nursery().start(Birth(self.task_id, str(self._folder), environment), theirs)
        os.close(theirs)
        watcher.setblocking(False)
        self._pid = int(await loop.sock_recv(watcher, MESSAGE_BYTES))
        self._tasks = [loop.create_task(self._watch(watcher)), loop.create_task(self._read(output))]

    async def ended(self) -> None:
        """Wait until the container's program has ended; then end what it left, and read its output to the end."""
        await self._has_ended.wait()
        self.input_taken.set()
        await self.kill()
        await asyncio.gather(*self._tasks)

    async def kill(self) -> None:
        """End every process of the container; returns when they are gone."""
        self._signal(signal.SIGKILL)  # by its id: its mark comes a moment after its start
        while pids := marked_pids(self.task_id):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        if self._pid is not None:
            await self._has_ended.wait()

    def interrupt(self) -> None:
        """What Modal does first to a container that it takes back."""
        assert self._pid is not None
        self._signal(signal.SIGINT)

    def job_pids(self) -> list[int]:
        """Live processes, without Modal's own program."""
        return [pid for pid in marked_pids(self.task_id) if pid != self._pid]

    def _signal(self, number: signal.Signals) -> None:
        if self._pid is not None and not self._has_ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    async def _watch(self, watcher: socket.socket) -> None:
        try:
            with watcher:
                self.exit_code = int(await asyncio.get_running_loop().sock_recv(watcher, MESSAGE_BYTES))
        finally:
            self._has_ended.set()

    async def _read(self, output: int) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(output, "rb", buffering=0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        # In pieces as they come, as Modal stores them: not by lines.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while piece := await reader.read(4096):
            self._on_output(decoder.decode(piece))


def log_entry(call_id: str, task_id: str, text: str) -> api.TaskLogs:
    now_ns = time.time_ns()
    return api.TaskLogs(
        data=text,
        timestamp=now_ns / 1e9,
        timestamp_ns=now_ns,
        file_descriptor=api.FILE_DESCRIPTOR_STDOUT,
        function_call_id=call_id,
        container_id=task_id,
    )
