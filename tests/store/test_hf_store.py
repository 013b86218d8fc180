"""Hugging Face's S3 endpoint: the settings it needs, and nothing asked of the internet."""

from collections.abc import Callable
from contextlib import closing

import pytest

from composer_prime.errors import StoreUnusable
from composer_prime.store import open_store, probe_store
from composer_prime.store.hf import ENDPOINT_VARIABLE, open_hf
from composer_prime.store.s3 import PART_BYTES
from tests.servers import S3Server, faulty_s3


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3Server("elsewhere", "http://127.0.0.1:9", "key", "secret").environment().items():
        monkeypatch.setenv(name, value)


def test_client_is_set_up_as_the_endpoint_asks() -> None:
    store = open_hf("buckets/some-org/bucket/run")
    assert store.uri == "hf://buckets/some-org/bucket/run"
    client = store._connect()
    assert client.endpoint_url == "https://s3.hf.co/some-org", "not AWS_ENDPOINT_URL, which is another store's"
    assert client.config.s3 == {"addressing_style": "path"}
    assert client.config.request_checksum_calculation == client.config.response_checksum_validation == "when_required"


def test_requests_go_below_the_namespace_and_name_the_bucket_in_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_s3.running() as server:
        monkeypatch.setenv(ENDPOINT_VARIABLE, f"http://127.0.0.1:{server.server_port}/some-org")
        with closing(open_store("hf://buckets/some-org/bucket/run")) as store:
            assert store.create("k", b"first") is True
            assert store.create("k", b"second") is False
            store.put("large", bytes(3 * PART_BYTES))
    assert list(server.objects) == ["/some-org/bucket/run/k", "/some-org/bucket/run/large"]
    assert all(path.startswith("/some-org/bucket") for path in server.paths)
    assert server.puts == 3, "what goes to other services in parts goes here in one"


def test_refused_keys_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_s3.running() as server:
        server.known_key = "another"
        monkeypatch.setenv(ENDPOINT_VARIABLE, f"http://127.0.0.1:{server.server_port}/some-org")
        with (
            closing(open_store("hf://buckets/some-org/bucket")) as store,
            pytest.raises(StoreUnusable, match=r"hf://buckets/some-org/bucket .*S3 keys of the Hugging Face account"),
        ):
            probe_store(store)


@pytest.mark.s3
def test_settings_hold_on_a_real_server(store_uri: Callable[[str], str]) -> None:
    data = bytes(range(251)) * (2 * PART_BYTES // 251 + 1000)
    with closing(open_store(store_uri("hf"))) as store:
        probe_store(store)
        store.put("large", data)
        assert store.get("large") == data
