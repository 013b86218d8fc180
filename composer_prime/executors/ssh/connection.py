"""The way to one host over ssh: as ssh's own configuration has it, checked against known_hosts, tried again when lost.

A call runs remote.py on the host, its code and its request on standard input, so that nothing has to be installed there
and nothing secret stands on a command line. Every call may be repeated: what it asks for is done once.
"""

import asyncio
import json
import logging
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import asyncssh

from composer_prime.errors import BadInput, ComposerPrimeError, ExecutorError, JobUnknown
from composer_prime.executors.ssh.remote import REPLY

MARK = REPLY.encode()
KEEPALIVE_S, KEEPALIVES = 15, 3
"""A connection that answers none of so many questions in a row is lost."""
TRANSIENT = (OSError, asyncssh.Error)
"""What may pass by itself, once lasting refusals are told apart. TimeoutError is an OSError."""

# ssh's configuration may put these words into commands (ProxyCommand, Match exec): no shell sees more in them.
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9._+-]{0,63})@)?"
    r"(?P<address>[A-Za-z0-9_][A-Za-z0-9._-]{0,254}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>\d{1,5}))?"
)
_ENTRY = "composer_prime.executors.ssh.remote"
_SHIPPED = ("redaction.py", "executors/local/shim.py", "executors/ssh/remote.py")
_COMMAND = "import sys;r=sys.stdin.buffer;n,m=map(int,r.readline().split());exec(r.read(n));begin(r.read(m))"
_LOADER = """
def begin(text):
    import importlib, json, os, sys
    request = json.loads(text)
    workdir = os.path.expanduser(request["workdir"])
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
WORKDIR = "~/.composer-prime"
"""Folder there for jobs, their logs, and the environment whose programs jobs find first, `venv`."""

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


class Host:
    """One machine, as `[user@]address[:port]` names it; what is left out is as ~/.ssh/config says.

    Raises BadInput for a name that isn't one.
    """

    def __init__(self, name: str, patience: Patience) -> None:
        match = _HOST.fullmatch(name)
        if match is None or (match["port"] and not 1 <= int(match["port"]) <= 65535):
            raise BadInput(
                f"--on ssh:{name} must be ssh:[user@]address[:port], with a name or an IP address: another name goes "
                "into ~/.ssh/config, as the HostName of a Host"
            )
        self.name = name
        self.patience = patience
        self._address = match["address"].strip("[]")
        self._user = match["user"]
        self._port = int(match["port"]) if match["port"] else None

    async def call(self, operation: str, *, longer_s: float = 0.0, **arguments: Any) -> Any:
        """The answer to one call, repeated while the host doesn't give one; `longer_s`: what it may take beyond others.

        Raises BadInput for a host that can't be used, HostDown, JobUnknown, and ExecutorError for a host that answered
        with a failure.
        """
        return await self.repeated(lambda: self._ask(operation, arguments, self.patience.call_s + longer_s))

    async def repeated(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """What `attempt` gives, tried again with growing pauses for as long as the connection is to blame."""
        pauses_s = iter(self.patience.pauses_s)
        while True:
            try:
                return await attempt()
            except TRANSIENT as error:
                self._refuse_lasting(error)
                pause_s = next(pauses_s, None)
                if pause_s is None:
                    raise HostDown(f"host {self.name} doesn't answer: {_reason(error)}") from None
                log.info("host=%s pause_s=%s error=%s asking again", self.name, pause_s, _reason(error))
                await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncssh.SSHClientConnection]:
        """A connection of its own."""
        try:
            async with asyncio.timeout(self.patience.connect_s):
                opened = await asyncssh.connect(**self._options())
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            raise BadInput(f"host {self.name}: a key can't be read: {error}. ssh-add it") from None
        except asyncssh.ConfigParseError as error:
            raise BadInput(f"host {self.name}: ~/.ssh/config can't be read: {error}") from None
        try:
            yield opened
        finally:
            opened.abort()

    @property
    def command(self) -> str:
        """The command line of every call."""
        return f"python3 -I -S -c {shlex.quote(_COMMAND)}"

    @property
    def ssh_command(self) -> str:
        """The ssh command line that reaches this host, for people."""
        port = ["-p", str(self._port)] if self._port else []
        return shlex.join(["ssh", *port, f"{self._user}@{self._address}" if self._user else self._address])

    def request(self, operation: str, arguments: Mapping[str, Any]) -> bytes:
        """What a call reads from standard input: lengths, code, request."""
        version, sources = _shipped()
        call = {
            "entry": _ENTRY, "version": version, "sources": sources, "workdir": WORKDIR,
            "operation": operation, "arguments": arguments,
        }  # fmt: skip
        loader, text = _LOADER.encode(), json.dumps(call).encode()
        return b"%d %d\n%b%b" % (len(loader), len(text), loader, text)

    def answer(self, line: bytes) -> Any:
        """What a reply line says. Raises JobUnknown, BadInput and ExecutorError as the host reports them."""
        reply = json.loads(line.removeprefix(MARK))
        for word, kind in (("unknown", JobUnknown), ("refused", BadInput), ("error", ExecutorError)):
            if word in reply:
                raise kind(f"host {self.name}: {reply[word]}")
        return reply["answer"]

    def failure(self, exit_status: int, complaint: str) -> ComposerPrimeError:
        """What a call that ended without an answer means; `complaint` is what it wrote to standard error."""
        last = next((line for line in reversed(complaint.splitlines()) if line.strip()), "it said nothing")
        if exit_status in (126, 127):
            return BadInput(f"host {self.name}: python3 can't be run there: {last}. Install Python 3.9 or newer")
        return ExecutorError(f"host {self.name} failed with exit code {exit_status}: {last}")

    async def _ask(self, operation: str, arguments: Mapping[str, Any], limit_s: float) -> Any:
        async with asyncio.timeout(self.patience.connect_s + limit_s), self.connection() as connection:
            request = self.request(operation, arguments)
            done = await connection.run(self.command, input=request, encoding=None, check=False)
        if done.exit_status is None:
            raise asyncssh.ConnectionLost("the connection was lost before the answer")
        for line in cast(bytes, done.stdout).splitlines():
            if line.startswith(MARK):
                return self.answer(line)
        raise self.failure(done.exit_status, cast(bytes, done.stderr).decode(errors="replace"))

    def _options(self) -> dict[str, Any]:
        """As asyncssh takes them. What is left out comes from ssh's own configuration."""
        known, config = Path("~/.ssh/known_hosts").expanduser(), Path("~/.ssh/config").expanduser()
        if not known.is_file():
            raise BadInput(
                f"host {self.name}: {known} isn't there: connect once by `{self.ssh_command}`, and compare the "
                "fingerprint"
            )
        given: dict[str, Any] = {
            "host": self._address,
            "known_hosts": str(known),
            "config": [str(config)] if config.is_file() else None,
            "keepalive_interval": KEEPALIVE_S,
            "keepalive_count_max": KEEPALIVES,
            "preferred_auth": "publickey",
            "agent_forwarding": False,
        }
        if self._port is not None:
            given["port"] = self._port
        if self._user is not None:
            given["username"] = self._user
        return given

    def _refuse_lasting(self, error: Exception) -> None:
        """Raise BadInput for what no repetition mends."""
        if isinstance(error, asyncssh.HostKeyNotVerifiable):
            raise BadInput(
                f"host {self.name}: {error.reason}: ~/.ssh/known_hosts doesn't hold the key that it shows. Compare the "
                f"fingerprint by `{self.ssh_command}`, then add or replace it; nothing was sent"
            ) from None
        if isinstance(error, asyncssh.PermissionDenied):
            raise BadInput(
                f"host {self.name} refuses the agent's keys and those of ~/.ssh for user "
                f"{self._user or 'of ~/.ssh/config'}: add a public key to authorized_keys there, or name another user "
                "or IdentityFile in ~/.ssh/config"
            ) from None


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
