"""A quick S3 server for unit tests: moto, in memory, which checks no credentials."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.servers.process import serving
from tests.servers.s3 import S3Server
from tests.servers.weed import free_ports

BUCKET = "composer-prime"
APP = Path(__file__).with_name("moto_app.py")


@contextmanager
def running(folder: Path) -> Iterator[S3Server]:
    """A moto server that has the bucket BUCKET and keeps its log in `folder`."""
    (port,) = free_ports(1)
    server = S3Server("moto", f"http://127.0.0.1:{port}", "composer", "composer-secret")
    with serving(
        [sys.executable, APP, str(port)],
        log=folder / "moto.log",
        is_ready=lambda: server.takes_objects(BUCKET),
        environment=server.environment(),
        folder=folder,
    ) as pid:
        yield replace(server, pid=pid)
