"""The processes of `bench link` and `bench join`: one a site, in its network namespace, spoken to line by line."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from composer_prime.errors import SiteError
from tests.bench.link.network import Network
from tests.servers import S3Server


@dataclass(frozen=True)
class SiteProcess:
    """A site that runs."""

    name: str
    process: subprocess.Popen[str]
    log: Path

    def hear(self) -> dict[str, Any]:
        """The next line that it says. Raises SiteError with the end of its log when it has ended."""
        line = _stdout(self.process).readline()
        if not line:
            said = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise SiteError(f"site {self.name} ended before it had measured:\n{said}")
        return json.loads(line)

    def tell(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("on\n")
        self.process.stdin.flush()


def _stdout(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


@contextlib.contextmanager
def started(module: str, task: Any, net: Network, server: S3Server, folder: Path) -> Iterator[SiteProcess]:
    """`python -m MODULE TASK.json` at a site until the block ends; `task` is a dataclass with a `site`."""
    path, log = folder / f"{task.site}.json", folder / f"{task.site}.log"
    path.write_text(json.dumps(asdict(task)))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*net.at_site(task.site), sys.executable, "-m", module, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, **server.environment(), "OMP_NUM_THREADS": "1"},
        )
    try:
        yield SiteProcess(task.site, process, log)
        assert process.stdin is not None
        process.stdin.close()
    finally:
        process.kill()  # its work is done, and what it would still say to the bucket nobody reads
        process.wait()
        _stdout(process).close()


@contextlib.contextmanager
def ending_tidily() -> Iterator[None]:
    """Turn SIGTERM into an exit that runs every `finally`, as SIGINT does."""

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
