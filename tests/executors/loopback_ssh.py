"""Machines behind ssh on this one: asyncssh's own server on loopback ports, each command a real process.

Host and client keys are made here. Trouble is what an sshd gives: sessions refused (MaxSessions), connections closed
before the first word (MaxStartups), connections that are lost with the answer, answers that come late.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import asyncssh

from composer_prime.executors import shim
from composer_prime.executors.base import Job
from composer_prime.executors.ssh import SshExecutor
from tests.architecture import REPOSITORY
from tests.executors.platforms import Trouble
from tests.patience import PATIENCE_S

GRACE_S = 2.0
SLOW_S = 2.0
LOST_ANSWER_S = 1.0
"""How long a call whose answer will be lost may work; one that lasts is cut off then."""
CLOSE_S = 20.0
"""How long the end of a loopback waits for the commands that it cancelled."""
RESOURCE_SHORTAGE = 4
"""RFC 4254's word for it."""
USER = "tester"
Result = TypeVar("Result")


class Troubles:
    """What shall go wrong with the next requests. Shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kind: Trouble | None = None
        self._count = 0
        self._skipped = 0
        self.taken = 0

    def set(self, kind: Trouble, count: int, after: int = 0) -> None:
        """From now on, or `after` so many requests of the kind that can have this trouble."""
        with self._lock:
            self._kind, self._count, self._skipped, self.taken = kind, count, after, 0

    def take(self, *kinds: Trouble) -> Trouble | None:
        """The trouble that this request has, if it is one of `kinds`."""
        with self._lock:
            if self._count == 0 or self._kind not in kinds:
                return None
            if self._skipped:
                self._skipped -= 1
                return None
            self._count -= 1
            self.taken += 1
            return self._kind


class _Server(asyncssh.SSHServer):
    """One connection to a machine."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._machine.connections.add(conn)
        if self._machine.troubles.take("503"):
            conn.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._machine.connections.discard(self._connection)

    def session_requested(self) -> Any:
        if self._machine.troubles.take("429"):
            raise asyncssh.ChannelOpenError(RESOURCE_SHORTAGE, "too many sessions")
        return asyncssh.SSHServerProcess(self._machine.serve, None, 3, False)

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        self._machine.forwarded.append(dest_port)
        return True


@dataclass
class Machine:
    """A host: its home, its keys, its port once it listens."""

    name: str
    home: Path
    key: asyncssh.SSHKey
    client_keys: Path
    troubles: Troubles
    port: int = 0
    connections: set[asyncssh.SSHServerConnection] = field(default_factory=set)
    forwarded: list[int] = field(default_factory=list)
    """Ports that others were reached at through this machine."""
    commands: list[str] = field(default_factory=list)
    """Every command line that was run."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of its own environment, besides."""
    _listener: asyncssh.SSHAcceptor | None = None
    _commands: set["asyncio.Task[None]"] = field(default_factory=set)

    def environment(self) -> dict[str, str]:
        """Of what is run there: this machine's Python, and our package as its environment has it."""
        path = f"{Path(sys.executable).parent}:{os.defpath}"
        return {
            "HOME": str(self.home), "USER": USER, "PATH": path, "LANG": "C.UTF-8", "PYTHONPATH": str(REPOSITORY),
        } | self.variables  # fmt: skip

    async def listen(self) -> None:
        """Take connections, at the port it had if it had one."""
        self._listener = await asyncssh.listen(
            "127.0.0.1",
            self.port,
            server_factory=lambda: _Server(self),
            server_host_keys=[self.key],
            authorized_client_keys=str(self.client_keys),
            encoding=None,
        )
        self.port = self._listener.get_port()

    async def stop(self) -> None:
        """Take no connections any more, and lose those there are; jobs go on."""
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()
            self._listener = None
        self.cut()

    def cut(self) -> None:
        """Lose every connection."""
        for connection in list(self.connections):
            connection.abort()

    async def end_commands(self) -> None:
        """End what connections left running, which jobs aren't; what doesn't end in a while is left behind."""
        for command in self._commands:
            command.cancel()
        if self._commands:
            await asyncio.wait(self._commands, timeout=CLOSE_S)

    async def serve(self, process: "asyncssh.SSHServerProcess[bytes]") -> None:
        """Run one command, as sshd's child would."""
        assert process.command is not None, "no login shells here"
        self.commands.append(process.command)
        command = asyncio.create_task(self._run(process, process.command))
        self._commands.add(command)
        command.add_done_callback(self._commands.discard)

    async def _run(self, process: "asyncssh.SSHServerProcess[bytes]", command: str) -> None:
        trouble = self.troubles.take("slow", "reset")
        if trouble == "slow":
            await asyncio.sleep(SLOW_S)
        child = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment(),
            cwd=self.home,
            start_new_session=True,
        )
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        feeding = asyncio.create_task(_pump(process.stdin, child.stdin))
        answering = trouble != "reset"
        outputs = [
            asyncio.create_task(_pump(child.stdout, process.stdout if answering else None)),
            asyncio.create_task(_pump(child.stderr, process.stderr if answering else None)),
        ]
        try:
            if not answering:
                await asyncio.wait(outputs, timeout=LOST_ANSWER_S)
                process.channel.get_connection().abort()
            await asyncio.gather(*outputs)
            process.exit(await child.wait())
        finally:
            if child.returncode is None:
                child.kill()
            for task in (feeding, *outputs):
                task.cancel()
            await asyncio.gather(feeding, *outputs, return_exceptions=True)
            child._transport.close()  # pyright: ignore[reportAttributeAccessIssue] (a grandchild may hold its pipes)
            await child.wait()


async def _pump(source: Any, sink: Any) -> None:
    """Copy until the end of `source`, then end `sink`; what a sink that is gone doesn't take is dropped."""
    with suppress(asyncssh.Error):  # the connection is lost: there is no more to read
        while data := await source.read(1 << 16):
            with suppress(OSError):
                if sink is not None:
                    sink.write(data)
                    await sink.drain()
    with suppress(OSError):
        if sink is not None:
            sink.write_eof()


class SshPlatform:
    """One machine of a person's. While it is open, this process's home has the ssh configuration that leads there."""

    name = "ssh"
    has_requests = True
    has_queue = False
    keeps_caches = True

    def __init__(self, folder: Path, machines: Sequence[str] = ("left",)) -> None:
        """`machines`: the first is the platform's."""
        self.folder = folder
        self.troubles = Troubles()
        self._executors: list[SshExecutor] = []
        self.ssh = folder / "home" / ".ssh"
        self.ssh.mkdir(parents=True)
        client_key = asyncssh.generate_private_key("ssh-ed25519")
        client_key.write_private_key(self.ssh / "id_ed25519")
        client_key.write_public_key(folder / "authorized_keys")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loopback-ssh", daemon=True)
        self._thread.start()
        self.machines = {name: self._machine(name) for name in machines}
        self.machine = self.machines[machines[0]]
        self.trust(*self.machines.values())
        self._before = {name: os.environ.get(name) for name in self.environment()}
        os.environ.update(self.environment())

    def executor(self) -> SshExecutor:
        """A new client, which knows nothing of the others."""
        executor = SshExecutor(self.host(), grace_s=GRACE_S)
        self._executors.append(executor)
        return executor

    def host(self, name: str | None = None) -> str:
        """A machine, as `--on ssh:` names it."""
        machine = self.machine if name is None else self.machines[name]
        return f"{USER}@127.0.0.1:{machine.port}"

    def trust(self, *machines: Machine) -> None:
        """Whose keys the person has compared."""
        keys = ((each.port, each.key.export_public_key().decode().strip()) for each in machines)
        (self.ssh / "known_hosts").write_text("".join(f"[127.0.0.1]:{port} {key}\n" for port, key in keys))

    def environment(self) -> dict[str, str]:
        """Keys of whoever runs the tests stay out."""
        return {"SSH_AUTH_SOCK": "", "HOME": str(self.folder / "home")}

    def launch_option(self) -> str:
        return f"ssh:{self.host()}"

    def trouble(self, kind: Trouble, count: int) -> None:
        self.troubles.set(kind, count)
        if kind == "503":
            for machine in self.machines.values():
                self._loop.call_soon_threadsafe(machine.cut)

    def cut(self) -> None:
        """Lose every connection."""
        self._loop.call_soon_threadsafe(self.machine.cut)

    def stop(self) -> None:
        """The machine can't be reached; its jobs go on."""
        self._run(self.machine.stop())

    def start(self) -> None:
        """The machine is there again, at the same address."""
        self._run(self.machine.listen())

    def pids(self, job: Job) -> list[int]:
        """The command's processes and its keeper."""
        folder = self.folder_of(job)
        state = shim.read_state(str(folder))
        found = set(shim.job_processes(str(folder)))
        if state is not None and shim.process_start(state["keeper"]) == state["keeper_start"]:
            found.add(state["keeper"])
        return sorted(found)

    def preempt(self, job: Job) -> None:
        """The machine loses power: no process of the job gets a word, its keeper neither."""
        while pids := self.pids(job):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    def hold_pending(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def folder_of(self, job: Job) -> Path:
        """The job's folder."""
        return self.machine.home / ".composer-prime" / "jobs" / job.run / job.site / str(job.attempt)

    def close(self) -> None:
        """End every job, the machines, and the clients."""
        for executor in self._executors:
            executor.close()
        for machine in self.machines.values():
            for state in machine.home.glob(".composer-prime/jobs/*/*/*/state.json"):
                run, site, attempt = state.parts[-4:-1]
                self.preempt(Job(self.name, "", run, site, int(attempt)))
            self._run(machine.stop())
            self._run(machine.end_commands())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _machine(self, name: str) -> Machine:
        home = self.folder / name
        home.mkdir()
        key = asyncssh.generate_private_key("ssh-ed25519")
        machine = Machine(name, home, key, self.folder / "authorized_keys", self.troubles)
        self._run(machine.listen())
        return machine

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=PATIENCE_S)
