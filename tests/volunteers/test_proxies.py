"""Behind a proxy: whatever a volunteer's machine asks of the bucket goes through the one that its environment names."""

import datetime
import ipaddress
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from composer_prime.store import open_store, probe_store
from composer_prime.volunteers.link import clock_ahead_s, measure
from tests.servers import S3Server
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
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    files = tmp_path / "certificate.pem", tmp_path / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(files[0]), str(files[1])


def test_the_buckets_requests_and_the_clocks_go_through_it(
    store_uri: Callable[[str], str], seaweed: S3Server, proxy: ForwardProxy
) -> None:
    with closing(open_store(store_uri("seaweed"))) as store:
        probe_store(store)
        link = measure(store)
    assert link.up_mbit is not None and link.down_mbit is not None
    ahead_s = clock_ahead_s(seaweed.endpoint)
    assert ahead_s is not None and abs(ahead_s) < 60
    host = urlsplit(seaweed.endpoint).netloc
    assert {line.split()[0] for line in proxy.passed} == {"GET", "PUT", "DELETE", "HEAD"}
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
        assert clock_ahead_s(f"https://127.0.0.1:{port}") is not None
    assert proxy.passed and set(proxy.passed) == {f"CONNECT 127.0.0.1:{port}"}
