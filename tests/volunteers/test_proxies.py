"""Behind a proxy: whatever a volunteer's machine asks of the bucket goes through the one that its environment names."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from composer_prime.plan.link import measure
from composer_prime.store import open_store, probe_store
from tests.servers import S3Server
from tests.servers.certificate import write_certificate
from tests.servers.forward_proxy import ForwardProxy, forward_proxy, tls_front

pytestmark = pytest.mark.s3


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForwardProxy]:
    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with forward_proxy() as running:
        monkeypatch.setenv("HTTP_PROXY", running.url)
        monkeypatch.setenv("http_proxy", running.url)
        monkeypatch.setenv("HTTPS_PROXY", running.url)
        monkeypatch.setenv("https_proxy", running.url)
        yield running


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """(certificate, key) files for 127.0.0.1, signed by itself."""
    return write_certificate(tmp_path, "127.0.0.1")


def test_the_buckets_requests_go_through_it(
    store_uri: Callable[[str], str], seaweed: S3Server, proxy: ForwardProxy
) -> None:
    with closing(open_store(store_uri("seaweed"))) as store:
        probe_store(store)
        link = measure(store)
    assert link.up_mbit is not None and link.down_mbit is not None
    host = urlsplit(seaweed.endpoint).netloc
    assert {line.split()[0] for line in proxy.passed} == {"GET", "PUT", "DELETE"}
    assert all(f" http://{host}/" in line for line in proxy.passed)


def test_https_goes_through_a_tunnel(
    store_uri: Callable[[str], str],
    seaweed: S3Server,
    proxy: ForwardProxy,
    certificate: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = store_uri("seaweed")
    with tls_front(urlsplit(seaweed.endpoint).port or 0, *certificate) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_CA_BUNDLE", certificate[0])
        monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
        with closing(open_store(uri)) as store:
            probe_store(store)
            assert measure(store).up_mbit is not None
    assert proxy.passed and set(proxy.passed) == {f"CONNECT 127.0.0.1:{port}"}
