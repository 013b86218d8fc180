"""Connections to hosts: kept, checked against known_hosts, made anew when lost; a call is repeated until answered.

A call runs remote.py on the host, its code and its request on standard input, so that nothing has to be installed
there and nothing secret stands on a command line. Every call may be repeated: what it asks for is done once.
"""

import asyncio
import json
import logging
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import asyncssh

from composer_prime.errors import BadInput, ComposerPrimeError, ExecutorError, JobUnknown
from composer_prime.executors.ssh.hosts import Hop, Host
from composer_prime.executors.ssh.remote import REPLY

MAX_SESSIONS = 8
"""Calls at once over one connection: sshd's own limit is 10."""
KEEPALIVE_S, KEEPALIVES = 15, 3
"""A connection that answers none of so many questions in a row is lost."""
MARK = REPLY.encode()

_ENTRY = "composer_prime.executors.ssh.remote"
_SHIPPED = ("redaction.py", "executors/local/shim.py", "executors/ssh/remote.py")
_START = "import sys;r=sys.stdin.buffer;n,m=map(int,r.readline().split());exec(r.read(n));begin(r.read(m))"
_LOADER = """
def begin(text):
    import importlib, json, os, sys
    request = json.loads(text)
    workdir = os.path.expanduser(request["workdir"])
    if request.pop("strange"):
        workdir = request["workdir"] = os.path.realpath(workdir)
        if not os.path.isdir(workdir):
            sys.exit(f"{workdir} isn't there, so no job was started in it")
        there = os.stat(workdir)
        if there.st_uid != os.geteuid() or there.st_mode & 0o002:
            sys.exit(f"{workdir} belongs to another user, or any may write there: nothing of it is trusted")
    os.makedirs(workdir, mode=0o700, exist_ok=True)
    root = os.path.join(workdir, "code", request.pop("version"))
    for name, source in request.pop("sources").items():
        path = os.path.join(root, name)
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
                file.write(source)
            os.replace(file.name, path)
    sys.path.insert(0, root)
    importlib.import_module(request.pop("entry")).answer(request)
"""
TRANSIENT = (OSError, asyncssh.Error)
"""What may pass by itself, once lasting refusals are told apart. TimeoutError is an OSError."""

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Patience:
    """How long to try, in seconds.

    pauses_s   before each repetition
    connect_s, call_s   limits of one attempt
    lasted_s   a log's connection that was good for so long and is lost begins anew, with all patience
    """

    pauses_s: Sequence[float] = (0.2, 0.5, 1.0, 2.0, 4.0)
    connect_s: float = 15.0
    call_s: float = 60.0
    lasted_s: float = 10.0


class HostDown(ExecutorError):
    """A host gave no answer after all repetitions."""


class Link:
    """The way to one host. Belongs to one event loop.

    remark   ends errors about a host that a bucket describes, which is believed less; "": the person's own file does
    """

    def __init__(self, name: str, host: Host, patience: Patience, remark: str = "") -> None:
        self.name = name
        self.host = host
        self.patience = patience
        self._remark = remark
        self._connecting = asyncio.Lock()
        self._sessions = asyncio.Semaphore(MAX_SESSIONS)
        self._way: list[asyncssh.SSHClientConnection] = []
        """The hops and, last, the host."""

    @classmethod
    def of_record(cls, bucket: str, name: str, host: Host, patience: Patience) -> Self:
        """The way to a host that `bucket` describes. The key, a path on another machine, is only named in errors."""
        used = f" and its launch used the key {host.key}" if host.key else ""
        remark = (
            f" (so {bucket} records it{used}: where that won't do here, say more in ~/.ssh/config, or give a hosts "
            "file by --on ssh:FILE)"
        )
        return cls(name, host.model_copy(update={"key": None}), patience, remark)

    async def call(self, operation: str, *, longer_s: float = 0.0, **arguments: Any) -> Any:
        """The answer to one call, repeated while the host doesn't give one; `longer_s`: what it may take beyond others.

        Raises BadInput for a host that can't be used as it is described, HostDown, JobUnknown, and ExecutorError for a
        host that answered with a failure.
        """
        return await self.repeated(lambda: self._ask(operation, arguments, self.patience.call_s + longer_s))

    async def repeated(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """What `attempt` gives, tried again with growing pauses for as long as the connection is to blame."""
        pauses_s = iter(self.patience.pauses_s)
        while True:
            try:
                return await attempt()
            except TRANSIENT as error:
                self.refuse_lasting(error)
                if not isinstance(error, asyncssh.ChannelOpenError):
                    self.drop()
                pause_s = next(pauses_s, None)
                if pause_s is None:
                    where = f"host {self.name} ({self.host.address})"
                    raise HostDown(f"{where} doesn't answer: {_reason(error)}{self._remark}") from None
                log.info("host=%s pause_s=%s error=%s asking again", self.name, pause_s, _reason(error))
                await asyncio.sleep(pause_s)

    async def _ask(self, operation: str, arguments: Mapping[str, Any], limit_s: float) -> Any:
        async with self._sessions, asyncio.timeout(limit_s):
            connection = await self._connected()
            request = self.request(operation, arguments)
            done = await connection.run(self.command, input=request, encoding=None, check=False)
        if done.exit_status is None:
            raise asyncssh.ConnectionLost("the connection was lost before the answer")
        for line in cast(bytes, done.stdout).splitlines():
            if line.startswith(MARK):
                return self.answer(line)
        raise self.failure(done.exit_status, cast(bytes, done.stderr).decode(errors="replace"))

    def answer(self, line: bytes) -> Any:
        """What a reply line says. Raises JobUnknown, BadInput and ExecutorError as the host reports them."""
        reply = json.loads(line.removeprefix(MARK))
        if "unknown" in reply:
            raise JobUnknown(f"host {self.name}: {reply['unknown']}")
        if "refused" in reply:
            raise BadInput(f"host {self.name}: {reply['refused']}")
        if "error" in reply:
            raise ExecutorError(f"host {self.name}: {reply['error']}")
        return reply["answer"]

    def failure(self, exit_status: int, complaint: str) -> ComposerPrimeError:
        """What a call that ended without an answer means; `complaint` is what it wrote to standard error."""
        last = next((line for line in reversed(complaint.splitlines()) if line.strip()), "it said nothing")
        if exit_status in (126, 127):
            return BadInput(
                f"host {self.name}: python ({self.host.python}) can't be run there: {last}. Install Python 3.9 or "
                f"newer, or name one by `python` in the hosts file{self._remark}"
            )
        return ExecutorError(f"host {self.name} failed with exit code {exit_status}: {last}{self._remark}")

    @property
    def command(self) -> str:
        """The command line of every call; a leading ~ is left to the shell there."""
        python = self.host.python
        word = f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)
        return f"{word} -I -S -c {shlex.quote(_START)}"

    def request(self, operation: str, arguments: Mapping[str, Any]) -> bytes:
        """What a call reads from standard input: lengths, code, request."""
        version, sources = _shipped()
        call = {
            "entry": _ENTRY, "version": version, "sources": sources, "host": self.name,
            "workdir": self.host.workdir, "strange": bool(self._remark), "operation": operation, "arguments": arguments,
        }  # fmt: skip
        loader, text = _LOADER.encode(), json.dumps(call).encode()
        return b"%d %d\n%b%b" % (len(loader), len(text), loader, text)

    @asynccontextmanager
    async def own_connection(self) -> AsyncIterator[asyncssh.SSHClientConnection]:
        """A connection apart from the shared one, for what lasts: it takes no session from others."""
        way = await self._connect()
        try:
            yield way[-1]
        finally:
            _close(way)

    async def _connected(self) -> asyncssh.SSHClientConnection:
        async with self._connecting:
            if not self._way or any(connection.is_closed() for connection in self._way):
                self.drop()
                self._way = await self._connect()
            return self._way[-1]

    async def _connect(self) -> list[asyncssh.SSHClientConnection]:
        """Through the hops to the host; each is checked against known_hosts."""
        way: list[asyncssh.SSHClientConnection] = []
        target = Hop(self.host.address, self.host.user, self.host.port)
        try:
            async with asyncio.timeout(self.patience.connect_s):
                for hop in (*self.host.hops, target):
                    way.append(await asyncssh.connect(**self._options(hop), tunnel=way[-1] if way else ()))
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            raise BadInput(
                f"host {self.name}: key ({self.host.key}) can't be read: {error}. Give an unprotected one, or ssh-add "
                "it and drop `key`"
            ) from None
        except asyncssh.ConfigParseError as error:
            raise BadInput(f"host {self.name}: ssh_config ({self.host.ssh_config}) can't be read: {error}") from None
        finally:
            if len(way) <= len(self.host.hops):
                _close(way)
        return way

    def _options(self, hop: Hop) -> dict[str, Any]:
        """As asyncssh takes them. What is left out comes from ssh's own configuration."""
        known, config = Path(self.host.known_hosts).expanduser(), Path(self.host.ssh_config).expanduser()
        if not known.is_file():
            raise BadInput(
                f"host {self.name}: known_hosts ({known}) isn't there: connect once by `{self.host.ssh_command()}` and "
                f"compare the fingerprint, or name the file that has the host's key{self._remark}"
            )
        if self.host.key is not None and not Path(self.host.key).expanduser().is_file():
            raise BadInput(f"host {self.name}: key ({self.host.key}) isn't there: name a private key file")
        options: dict[str, Any] = {
            "host": hop.address,
            "known_hosts": str(known),
            "config": [str(config)] if self.host.ssh_config and config.is_file() else None,
            "keepalive_interval": KEEPALIVE_S,
            "keepalive_count_max": KEEPALIVES,
            "preferred_auth": "publickey",
            "agent_forwarding": False,
        }
        if hop.port is not None:
            options["port"] = hop.port
        if hop.user is not None:
            options["username"] = hop.user
        if self.host.key is not None:
            options["client_keys"] = [str(Path(self.host.key).expanduser())]
            options["agent_path"] = None  # an agent's other keys would use up the tries that sshd allows
        return options

    def refuse_lasting(self, error: Exception) -> None:
        """Raise BadInput for what no repetition mends."""
        where = f"host {self.name} ({self.host.address})"
        if isinstance(error, asyncssh.HostKeyNotVerifiable):
            raise BadInput(
                f"{where}: {error.reason}: {self.host.known_hosts} doesn't hold the key that it shows. Compare the "
                f"fingerprint by `{self.host.ssh_command()}`, then add or replace it; nothing was sent{self._remark}"
            ) from None
        if isinstance(error, asyncssh.PermissionDenied):
            key = self.host.key or "the agent's keys and those in ~/.ssh"
            raise BadInput(
                f"{where} refuses {key} for user {self.host.user or 'of your ssh configuration'}: add the public key "
                f"to authorized_keys there, or name another user or key{self._remark}"
            ) from None

    def drop(self) -> None:
        """Let go of the shared connection; the next call makes another."""
        _close(self._way)
        self._way = []


def _close(way: list[asyncssh.SSHClientConnection]) -> None:
    for connection in reversed(way):
        with suppress(OSError):
            connection.abort()


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return "no answer in time" if isinstance(error, TimeoutError) and text == "TimeoutError" else text


@cache
def _shipped() -> tuple[str, dict[str, str]]:
    """(version, file name -> source) of what runs on a host; packages there are empty but for these modules."""
    folder = Path(__file__).parents[2]
    sources = {"composer_prime/__init__.py": "", "composer_prime/executors/__init__.py": ""}
    sources |= {f"composer_prime/{name}": (folder / name).read_text(encoding="utf-8") for name in _SHIPPED}
    return sha256(json.dumps(sources).encode()).hexdigest()[:16], sources
