"""Fixtures of the servers that only the store room's tests need; modules import them by name."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from composer_prime.store import Store, open_store
from composer_prime.store.obstore import HF_ENDPOINT_VARIABLE
from tests.servers import S3Server, faulty_s3, stand_ins
from tests.servers import rclone as rclone_server
from tests.servers.faulty_s3 import FaultyServer
from tests.servers.stand_ins import StandIn


@pytest.fixture(scope="session")
def gs() -> Iterator[StandIn]:
    """A stand-in for Google Cloud Storage, for the whole session."""
    with stand_ins.running("gs") as server:
        yield server


@pytest.fixture(scope="session")
def az() -> Iterator[StandIn]:
    """A stand-in for Azure's Blob service, for the whole session."""
    with stand_ins.running("az") as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An rclone that serves S3 for the whole session, with the bucket `tests.servers.rclone.BUCKET`."""
    with rclone_server.running(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """An S3 server that fails on cue, and the AWS variables that point to it."""
    with faulty_s3.running() as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        for variable, value in S3Server("faulty", endpoint, "key", "secret").environment().items():
            monkeypatch.setenv(variable, value)
        yield server


@pytest.fixture
def faulty_store(faulty: FaultyServer) -> Iterator[Store]:
    """The bucket of the server that fails on cue."""
    with closing(open_store("s3://bucket")) as store:
        yield store


@pytest.fixture
def store_uri(
    request: pytest.FixtureRequest, store_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """The shared `store_uri`, which also knows "gs", "az", "rclone", and "hf" (our settings for it, on SeaweedFS)."""

    def fresh(kind: str) -> str:
        if kind == "hf":
            bucket = store_uri("seaweed").removeprefix("s3://")
            monkeypatch.setenv(HF_ENDPOINT_VARIABLE, request.getfixturevalue("seaweed").endpoint)
            monkeypatch.delenv("AWS_ENDPOINT_URL")
            return f"hf://buckets/composer/{bucket}"
        if kind not in stand_ins.KINDS:
            return store_uri(kind)
        for variable, value in request.getfixturevalue(kind).environment().items():
            monkeypatch.setenv(variable, value)
        return store_uri("memory").replace("memory://", f"{kind}://{stand_ins.BUCKET}/")

    return fresh
