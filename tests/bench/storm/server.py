"""The storm's store: a real SeaweedFS on loopback, in a process that can be killed and started again on its data."""

import socket
import time
from pathlib import Path

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session

from composer_prime.errors import SiteError
from composer_prime.sites.embedded.processes import Child
from tests.servers.weed import remove_sockets, remove_sockets_of, server_command, server_flags

BUCKET = "storm"
READY_S = 60.0
ACCESS_KEY, SECRET_KEY = "storm", "storm-secret"


class StormServer:
    """One SeaweedFS, all its parts in one process. Start it on the thread that outlives it."""

    def __init__(self, folder: Path) -> None:
        """folder: where it keeps its data and its log. Raises BadInput when the program is missing."""
        self._folder = folder
        self._flags = server_flags(folder, "127.0.0.1")  # its ports stay the same over restarts
        self._command = server_command(self._flags)
        self._child: Child | None = None
        self._client = None
        self.port = int(str(self._flags["s3.port"]))

    @property
    def environment(self) -> dict[str, str]:
        """The variables that send an AWS client to it."""
        return aws_environment(self.port)

    def start(self) -> None:
        """Start it, with the data it had; returns before it answers."""
        (self._folder / "data").mkdir(parents=True, exist_ok=True)
        variables = {**self.environment, "TMPDIR": str(self._folder)}  # where its own logs go
        self._child = Child("store", self._command, self._folder / "seaweed.log", env=variables)

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
        if self._child is not None and self._child.poll() is None:
            remove_sockets_of(self._child.pid)
            self._child.kill()

    def close(self) -> None:
        """End it and remove what it leaves outside its folder."""
        self.kill()
        remove_sockets(self._flags)


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
