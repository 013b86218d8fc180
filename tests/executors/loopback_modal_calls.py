"""Calls of functions on the loopback Modal: each gets a container, loses it, gets another, and ends in one result."""

import asyncio
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modal_proto import api_pb2 as api

from tests.executors.loopback_modal_containers import Container, log_entry

MAX_STARTS = 8
"""How often an input whose container was lost is given to a new one, as the client's own limit has it."""
GRACE_S = 30.0
"""What a container that is taken back has to end by itself."""
Result = api.GenericResult


@dataclass(eq=False)
class Call:
    """One call of one function, with one input."""

    id: str
    input_id: str
    function_id: str
    input: api.FunctionInput
    created_at: float = field(default_factory=time.time)
    containers: list[Container] = field(default_factory=list)
    log: list[api.TaskLogs] = field(default_factory=list)
    output: api.FunctionGetOutputsItem | None = None
    runner: asyncio.Task[None] | None = None

    @property
    def job_name(self) -> str:
        """What our own launcher calls it: the name in the function's one argument."""
        (argument,), _ = pickle.loads(self.input.args)
        return argument["name"]

    @property
    def container(self) -> Container | None:
        return self.containers[-1] if self.containers and self.output is None else None

    def finish(self, result: Result, data_format: Any = api.DATA_FORMAT_UNSPECIFIED) -> None:
        if self.output is None:
            task_id = self.containers[-1].task_id if self.containers else ""
            self.output = api.FunctionGetOutputsItem(
                result=result,
                input_id=self.input_id,
                task_id=task_id,
                data_format=data_format,
                output_created_at=time.time(),
            )


@dataclass(frozen=True)
class Function:
    """What a deployed function is made of, as far as a container needs it."""

    id: str
    app_id: str
    definition: api.Function
    files: dict[str, bytes]
    secrets: dict[str, str]
    volumes: dict[str, Path]
    programs: Path | None


class Calls:
    """All calls, and the machines they run on. Its methods run in the server's event loop."""

    def __init__(self, folder: Path, functions: dict[str, Function], new_id: Callable[[str], str]) -> None:
        self.url = ""
        self.by_id: dict[str, Call] = {}
        self.may_start = asyncio.Event()
        self.may_start.set()
        self._folder = folder
        self._functions = functions
        self._new_id = new_id

    def begin(self, function_id: str, given: api.FunctionInput) -> Call:
        call = Call(self._new_id("fc"), self._new_id("in"), function_id, given)
        self.by_id[call.id] = call
        call.runner = asyncio.create_task(self._run(call))
        return call

    def of_task(self, task_id: str) -> tuple[Call, Container]:
        return next(
            (call, container)
            for call in self.by_id.values()
            for container in call.containers
            if container.task_id == task_id
        )

    async def cancel(self, call: Call) -> None:
        """End the call with its container, as `terminate_containers=True` asks."""
        if call.output is None:
            container = call.container
            call.finish(Result(status=Result.GENERIC_STATUS_TERMINATED, exception="Input was cancelled"))
            if container is not None:
                await container.kill()

    async def take_back(self, call: Call, *, warn: bool) -> None:
        """Take the machine back under a running call; `_run` gives the input to another. Returns once all is gone."""
        container = call.container
        assert container, f"{call.job_name} isn't running"
        if warn:
            container.interrupt()
            try:
                await asyncio.wait_for(asyncio.shield(self._gone(container)), GRACE_S)
            except TimeoutError:
                await container.kill()
        else:
            await container.kill()

    async def close(self) -> None:
        for call in self.by_id.values():
            await self.cancel(call)
        self.may_start.set()
        await asyncio.gather(*(call.runner for call in self.by_id.values() if call.runner))

    async def _gone(self, container: Container) -> None:
        while container.job_pids():
            await asyncio.sleep(0.02)

    async def _run(self, call: Call) -> None:
        await self.may_start.wait()
        for _ in range(MAX_STARTS):
            if call.output is not None:
                return
            container = await self._start(call)
            if call.output is not None:
                await container.kill()
            ended = asyncio.create_task(container.ended())
            timeout_s = self._functions[call.function_id].definition.timeout_secs
            # An input's time begins when the container takes it.
            await container.input_taken.wait()
            await asyncio.wait({ended}, timeout=timeout_s)
            if not ended.done():
                await container.kill()
                call.finish(Result(status=Result.GENERIC_STATUS_TIMEOUT, exception=f"hit its timeout of {timeout_s}s"))
            await ended
            if container.output is not None:
                call.finish(container.output.result, container.output.data_format)
            elif container.init_failure is not None:
                call.finish(container.init_failure)
        call.finish(Result(status=Result.GENERIC_STATUS_INTERNAL_FAILURE, exception="Function crashed repeatedly"))

    async def _start(self, call: Call) -> Container:
        function = self._functions[call.function_id]
        task_id = self._new_id("ta")
        root = self._folder / task_id
        for name, content in function.files.items():
            # Modal puts a function's own file into /root.
            path = root / Path(name).relative_to("/root")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for path, volume in function.volumes.items():
            if not Path(path).exists():
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).symlink_to(volume)
        container = Container(task_id, root, lambda text: call.log.append(log_entry(call.id, task_id, text)))
        arguments = api.ContainerArguments(
            task_id=task_id,
            function_id=function.id,
            app_id=function.app_id,
            function_def=function.definition,
            environment_name="main",
        )
        call.containers.append(container)
        await container.start(self.url, arguments, function.secrets, function.programs)
        return container
