"""Where a bucket's credentials come from, and by which way requests go: what can be shown on one machine."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from composer_prime.errors import StoreUnusable
from composer_prime.store import open_store, probe_store, remote
from tests.servers.certificate import write_certificate
from tests.servers.faulty_s3 import FaultyServer
from tests.servers.forward_proxy import ForwardProxy, forward_proxy, tls_front
from tests.servers.in_thread import serving_handler

GIVEN = {"SecretAccessKey": "secret", "AccessKeyId": "given", "Expiration": "2099-01-01T00:00:00Z"}


@dataclass
class Giver:
    """A machine's metadata, a container's credentials, and a token service, that know the key `given`."""

    url: str = ""
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def giver() -> Iterator[Giver]:
    found = Giver()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            found.asked.append(f"{self.command} {self.path} {body}")
            if self.path.endswith(("/role", "/container")):
                said = json.dumps({**GIVEN, "Token": "token", "Code": "Success", "LastUpdated": "", "Type": "AWS-HMAC"})
            elif self.path.startswith("/latest"):
                said = "role"
            else:
                fields = "".join(f"<{name}>{value}</{name}>" for name, value in {**GIVEN, "SessionToken": "t"}.items())
                given = f"<AssumeRoleResult><Credentials>{fields}</Credentials></AssumeRoleResult>"
                said = f"<AssumeRoleResponse>{given}</AssumeRoleResponse>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said.encode())

        do_PUT = do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Tests print nothing."""

    with serving_handler(Handler) as found.url:
        yield found


@pytest.fixture
def nobody(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FaultyServer:
    """The bucket, which knows the key `given` alone, on a machine that knows none."""
    faulty.known_key = "given"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return faulty


def container(url: str, folder: Path) -> dict[str, str]:
    (folder / "token").write_text("token")
    token = {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(folder / "token")}
    return {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{url}/container", **token}


def instance(url: str, folder: Path) -> dict[str, str]:
    return {"AWS_METADATA_ENDPOINT": url}


def assumed_by_a_profile(url: str, folder: Path) -> dict[str, str]:
    keys = "aws_access_key_id = own\naws_secret_access_key = secret\n"
    (folder / "AWS_SHARED_CREDENTIALS_FILE").write_text(f"[own]\n{keys}")
    role = "[profile site]\nrole_arn = arn:aws:iam::1:role/site\nsource_profile = own\nregion = us-east-1\n"
    (folder / "AWS_CONFIG_FILE").write_text(role)
    return {"AWS_PROFILE": "site", "AWS_ENDPOINT_URL_STS": url}


@pytest.mark.parametrize("kind", [container, instance, assumed_by_a_profile])
def test_credentials_that_somebody_gives_to_this_machine_open_the_bucket(
    kind: Callable[[str, Path], dict[str, str]],
    nobody: FaultyServer,
    giver: Giver,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in kind(giver.url, tmp_path).items():
        monkeypatch.setenv(name, value)
    with closing(open_store("s3://bucket")) as store:
        store.put("k", b"bytes")
        assert store.get("k") == b"bytes"
    assert giver.asked and nobody.objects == {"/bucket/k": b"bytes"}


def test_a_profile_without_boto3_names_the_extra(nobody: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "site")
    monkeypatch.setitem(__import__("sys").modules, "obstore.auth.boto3", None)
    with closing(open_store("s3://bucket")) as store, pytest.raises(StoreUnusable, match=r"boto3: .*\.\[aws\]'"):
        probe_store(store)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForwardProxy]:
    """What the environment names for all but this machine; it alone knows where 192.0.2.7 is."""
    for name in ("NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with forward_proxy({"192.0.2.7": "127.0.0.1"}) as running:
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, running.url)
        yield running


def test_a_proxy_from_the_environment_is_used(
    faulty: FaultyServer, proxy: ForwardProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"http://192.0.2.7:{faulty.server_port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", place)
    with closing(open_store("s3://bucket")) as store:
        store.put("k", b"bytes")
        assert store.get("k") == b"bytes"
    assert [line.split()[0] for line in proxy.passed] == ["GET", "PUT", "GET"], "first contact, put, get"
    assert all(f" {place}/" in line for line in proxy.passed)


def test_a_private_authority_is_trusted_where_the_environment_names_it_and_https_goes_through_a_tunnel(
    faulty: FaultyServer, proxy: ForwardProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote, "FIRST_CONTACT_S", 0.1)
    certificate, key = write_certificate(tmp_path, "192.0.2.7")
    with tls_front(faulty.server_port, certificate, key) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://192.0.2.7:{port}")
        with closing(open_store("s3://bucket")) as store, pytest.raises(StoreUnusable, match="no sound answer"):
            probe_store(store)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        with closing(open_store("s3://bucket")) as store:
            store.put("k", b"bytes")
    assert faulty.objects == {"/bucket/k": b"bytes"}
    assert set(proxy.passed) == {f"CONNECT 192.0.2.7:{port}"}


def test_a_proxy_gets_its_password_and_nobody_else_is_told_it(
    faulty: FaultyServer, proxy: ForwardProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_CONTACT_S", 0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://192.0.2.7")
    monkeypatch.setenv("https_proxy", f"http://alice:pass%2Bword@127.0.0.1:{faulty.server_port}")
    with closing(open_store("s3://bucket")) as store, pytest.raises(StoreUnusable) as refused:
        probe_store(store)
    assert "word" not in str(refused.value)
