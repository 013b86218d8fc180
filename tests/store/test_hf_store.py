"""Hugging Face's S3 endpoint: the settings it needs, and nothing asked of the internet."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from composer_prime.errors import StoreUnusable
from composer_prime.store import open_store, probe_store
from composer_prime.store.obstore import HF_ENDPOINT_VARIABLE, PART_BYTES
from tests.servers import S3Server, faulty_s3
from tests.servers.faulty_s3 import FaultyServer


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """In place of Hugging Face's; the AWS variables, in another region, name a store that isn't meant."""
    for name, value in S3Server("elsewhere", "http://127.0.0.1:9", "key", "secret").environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION"):
        monkeypatch.setenv(name, "http://127.0.0.1:9" if "URL" in name else "eu-central-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    with faulty_s3.running() as server:
        monkeypatch.setenv(HF_ENDPOINT_VARIABLE, f"http://127.0.0.1:{server.server_port}/some-org")
        yield server


def test_requests_go_below_the_namespace_to_the_one_region_and_name_the_bucket_in_the_path(
    endpoint: FaultyServer,
) -> None:
    with closing(open_store("hf://buckets/some-org/bucket/run")) as store:
        assert store.uri == "hf://buckets/some-org/bucket/run"
        assert store.create("k", b"first") is True
        assert store.create("k", b"second") is False
        store.put("large", bytes(3 * PART_BYTES))
    assert list(endpoint.objects) == ["/some-org/bucket/run/k", "/some-org/bucket/run/large"]
    assert all(path.startswith("/some-org/bucket") for path in endpoint.paths)
    assert all("/us-east-1/s3/" in signature for signature in endpoint.signed)
    assert endpoint.puts == 3, "what goes to other services in parts goes here in one"


def test_refused_keys_are_named_with_the_remedy(endpoint: FaultyServer) -> None:
    endpoint.known_key = "another"
    with (
        closing(open_store("hf://buckets/some-org/bucket")) as store,
        pytest.raises(StoreUnusable, match=r"hf://buckets/some-org/bucket .*S3 keys of the Hugging Face account"),
    ):
        probe_store(store)
