"""Containers of the loopback Modal: each runs Modal's own container program as a process, and dies whole.

A real container is a namespace: when it goes, everything in it goes. Here all its processes carry a mark in their
environment, and are found by it.
"""

import asyncio
import codecs
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from modal_proto import api_pb2 as api

MARK = "COMPOSER_PRIME_LOOPBACK_CONTAINER"
TASK_HEADER = "x-loopback-task"
_KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "PYTHONPATH", "OMP_NUM_THREADS", "VIRTUAL_ENV")
"""What a job sees of this machine's environment, as if it were in its image; nothing that could be a secret."""


def marked_pids(task_id: str) -> list[int]:
    """Live processes of a container."""
    mark = f"{MARK}={task_id}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


class Container:
    """One container, for one input."""

    def __init__(self, task_id: str, folder: Path, on_output: Callable[[str], None]) -> None:
        self.task_id = task_id
        self.output: api.FunctionPutOutputsItem | None = None
        self.init_failure: api.GenericResult | None = None
        self.input_taken = asyncio.Event()
        self._folder = folder
        self._on_output = on_output
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self, url: str, arguments: api.ContainerArguments, secrets: Mapping[str, str]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        written = self._folder / f"{self.task_id}.pb"
        written.write_bytes(arguments.SerializeToString())
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self._folder), kept.get("PYTHONPATH")]))
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
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "modal._container_entrypoint",
            cwd=self._folder,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_take_interrupts,
        )
        self._reader = asyncio.create_task(self._read())

    async def ended(self) -> None:
        """Wait until the container's program has ended; then end what it left, and read its output to the end."""
        assert self._process and self._reader
        await self._process.wait()
        self.input_taken.set()
        await self.kill()
        await self._reader

    async def kill(self) -> None:
        """End every process of the container; returns when they are gone."""
        while pids := marked_pids(self.task_id):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        if self._process is not None:
            await self._process.wait()

    def interrupt(self) -> None:
        """What Modal does first to a container that it takes back."""
        assert self._process
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def job_pids(self) -> list[int]:
        """Live processes, without Modal's own program."""
        runner = self._process.pid if self._process else None
        return [pid for pid in marked_pids(self.task_id) if pid != runner]

    async def _read(self) -> None:
        assert self._process and self._process.stdout
        # In pieces as they come, as Modal stores them: not by lines.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while piece := await self._process.stdout.read(4096):
            self._on_output(decoder.decode(piece))


def _take_interrupts() -> None:
    """A shell has what it starts in the background ignore SIGINT, and that is inherited; a container begins anew."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
