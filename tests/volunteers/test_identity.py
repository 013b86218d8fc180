"""A foreign bucket gets requests, and nothing by which it could know, or pretend to be, the volunteer."""

import json
import os
import secrets
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from composer_prime.store import open_store
from composer_prime.store import remote as store_remote
from composer_prime.volunteers import join as joining
from composer_prime.volunteers.invitation import Invitation, write_invitation
from tests.servers import S3Server
from tests.servers.forward_proxy import forward_proxy
from tests.servers.in_thread import serving_handler
from tests.volunteers.owned_run import CONSENT, OwnedRun, signed
from tests.volunteers.test_commands import refused

PLANTED = "Planted"
"""Part of every value by which the volunteer's machine says who its user is."""
BUCKET = "composer-prime"


class Recorder:
    """A bucket at an address of the inviter's, who keeps all that comes."""

    def __init__(self) -> None:
        self.url, self.came, self.refuses = "", list[str](), False

    @property
    def signed_by(self) -> set[str]:
        """The key ids in the requests' signatures; "" stands for none."""
        parts = [text.partition("Credential=")[2].partition("/")[0] for text in self.came]
        return set(parts)


@pytest.fixture
def recorder(moto: S3Server) -> Iterator[Recorder]:
    """In front of moto, open to everybody."""
    found, behind = Recorder(), urlsplit(moto.endpoint)

    class Front(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found.came.append(f"{self.command} {self.path}\n{self.headers}\n{body.decode(errors='replace')}")
            if found.refuses:
                said_no = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
                self.send_response_only(403)
                self.send_header("Content-Length", str(len(said_no)))
                self.end_headers()
                self.wfile.write(said_no)
                return
            connection = HTTPConnection(behind.hostname or "", behind.port, timeout=30)
            open_to_all = {"Authorization": "AWS4-HMAC-SHA256 Credential=any/20300101/us-east-1/s3/aws4_request"}
            connection.request(self.command, self.path, body, open_to_all | dict(self.headers))
            said = connection.getresponse()
            data = said.read()
            connection.close()
            self.send_response_only(said.status)
            for name, value in said.getheaders():
                if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    self.send_header(name, value)
            length = said.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = pass_on

        def log_message(self, format: str, *args: object) -> None:
            """Tests print nothing."""

    with serving_handler(Front) as found.url:
        yield found


@pytest.fixture(autouse=True)
def volunteer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with every kind of identity that our clients' libraries know where to find."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "HF_", "GOOGLE_", "COMPOSER_PRIME_"))]:
        del os.environ[name]
    home = tmp_path / "home"
    for folder in (".aws", ".cache/huggingface", ".config/gcloud"):
        (home / folder).mkdir(parents=True)
    (home / ".aws/credentials").write_text(
        f"[default]\naws_access_key_id = {PLANTED}Default\naws_secret_access_key = {PLANTED}\n"
        f"[work]\naws_access_key_id = {PLANTED}Work\naws_secret_access_key = {PLANTED}\n"
    )
    (home / ".netrc").write_text(f"default login {PLANTED} password {PLANTED}\n")
    (home / ".netrc").chmod(0o600)
    (home / "token").write_text(f"{PLANTED}WebIdentity")
    (home / ".cache/huggingface/token").write_text(f"hf_{PLANTED}")
    given = {"HOME": home, "NETRC": home / ".netrc", "HF_TOKEN": f"hf_{PLANTED}", "NO_PROXY": "*"}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    return home


pytestmark = pytest.mark.s3
WHO: dict[str, dict[str, str]] = {
    "variables": {
        "AWS_ACCESS_KEY_ID": f"{PLANTED}Key",
        "AWS_SECRET_ACCESS_KEY": PLANTED,
        "AWS_SESSION_TOKEN": f"{PLANTED}Session",
    },
    "profile": {"AWS_PROFILE": "work"},
    "files": {},
    "web identity": {
        "AWS_WEB_IDENTITY_TOKEN_FILE": "{home}/token",
        "AWS_ROLE_ARN": f"arn:aws:iam::123456789012:role/{PLANTED}",
        "AWS_SHARED_CREDENTIALS_FILE": "{home}/none",
    },
    "instance": {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "{recorder}",
        "AWS_SHARED_CREDENTIALS_FILE": "{home}/none",
    },
}


@pytest.fixture
def remote(moto: S3Server, run: OwnedRun) -> OwnedRun:
    """The run in moto's bucket, whose inviter has keys there."""
    with pytest.MonkeyPatch.context() as host:
        for name, value in moto.environment().items():
            host.setenv(name, value)
        return OwnedRun(run.folder / "remote", uri=f"s3://{BUCKET}/{secrets.token_hex(8)}/run")


def foreign(made: OwnedRun, recorder: Recorder, **environment: str) -> Invitation:
    """An invitation that names the recorder's address as the bucket's, as the run's owner signs it."""
    made.folder.mkdir(exist_ok=True)
    invitation = made.invite()
    given = {"AWS_ENDPOINT_URL": recorder.url, "AWS_DEFAULT_REGION": "us-east-1", **environment}
    invitation = signed(made, invitation, environment=given)
    rewrite(made, invitation)
    recorder.came.clear()
    return invitation


def rewrite(made: OwnedRun, invitation: Invitation) -> None:
    made.file().unlink()
    write_invitation(invitation, made.file())


def settle(who: str, home: Path, recorder: Recorder) -> None:
    for name, value in WHO[who].items():
        os.environ[name] = value.format(home=home, recorder=recorder.url)


def ways(made: OwnedRun) -> list[tuple[Any, ...]]:
    """The commands of docs/volunteers.md that an invitation is given to."""
    return [
        ("doctor", made.file(), *CONSENT),
        ("join", made.file(), *CONSENT, "--folder", made.folder / "alice"),
        ("contribution", made.file(), "--allow-local"),
    ]


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """What `join` starts instead of a site: one that reads and writes as a site does."""
    counted: list[int] = []

    def run_site(recipe: Any, site: str, resume: bool) -> int:
        store = open_store(f"{recipe.outer.store}/{recipe.run.name}")
        counted.append(len(store.list("")))
        store.put(f"probe/{site}/trial", b"x")
        return 0

    monkeypatch.setattr(joining, "site_runner", lambda recipe: run_site)
    return lambda: counted


@pytest.mark.parametrize("who", WHO)
def test_without_keys_in_the_invitation_no_request_says_who_asks(
    cli, remote: OwnedRun, recorder: Recorder, volunteer: Path, trains, who: str
) -> None:
    settle(who, volunteer, recorder)
    foreign(remote, recorder)
    for command in ways(remote):
        cli(*command)
        assert recorder.came, command
        assert recorder.signed_by == {""} and not [text for text in recorder.came if "uthorization" in text]
        assert not [text for text in recorder.came if PLANTED in text or "latest/meta-data" in text]
        recorder.came.clear()
    assert trains(), "join came as far as training"


def test_a_gateway_learns_the_sites_key_alone(
    cli, remote: OwnedRun, recorder: Recorder, volunteer: Path, trains
) -> None:
    settle("variables", volunteer, recorder)
    invitation = foreign(remote, recorder)
    rewrite(remote, signed(remote, invitation, uri=f"gateway+{recorder.url}/run", environment={}))
    for command in ways(remote):
        cli(*command)
        assert recorder.came and not [text for text in recorder.came if PLANTED in text or "uthorization" in text]
        recorder.came.clear()


def test_half_a_key_in_the_invitation_brings_no_other_half_of_ones_own(
    cli, remote: OwnedRun, recorder: Recorder, volunteer: Path, trains
) -> None:
    settle("files", volunteer, recorder)
    foreign(remote, recorder, AWS_SESSION_TOKEN="theirs")
    for command in ways(remote):
        cli(*command)
    assert recorder.came and recorder.signed_by == {""}


def test_the_invitations_keys_sign_where_it_has_some(
    cli, remote: OwnedRun, recorder: Recorder, volunteer: Path, trains
) -> None:
    settle("variables", volunteer, recorder)
    foreign(remote, recorder, AWS_ACCESS_KEY_ID="TheirKeyId", AWS_SECRET_ACCESS_KEY="TheirSecret")
    for command in ways(remote):
        cli(*command)
        assert recorder.signed_by - {""} == {"TheirKeyId"} and PLANTED not in "".join(recorder.came)
        recorder.came.clear()


def test_ones_own_keys_sign_where_one_says_so(
    cli, remote: OwnedRun, recorder: Recorder, volunteer: Path, trains
) -> None:
    settle("files", volunteer, recorder)
    foreign(remote, recorder, AWS_ACCESS_KEY_ID="TheirKeyId", AWS_SECRET_ACCESS_KEY="TheirSecret")
    for command in ways(remote):
        cli(*command, "--use-my-aws")
        assert recorder.signed_by - {""} == {f"{PLANTED}Default"}
        recorder.came.clear()


def test_a_bucket_that_takes_nobody_without_keys_is_refused_in_a_line_that_says_what_to_do(
    cli, remote: OwnedRun, recorder: Recorder, trains
) -> None:
    foreign(remote, recorder)
    recorder.refuses = True
    for command in ways(remote):
        refused(cli(*command), "carry no credentials", "--use-my-aws")


def test_no_token_is_fetched_for_a_bucket_at_google(
    cli, remote: OwnedRun, recorder: Recorder, volunteer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = {"type": "authorized_user", "client_id": PLANTED, "client_secret": PLANTED, "refresh_token": PLANTED}
    (volunteer / ".config/gcloud/application_default_credentials.json").write_text(json.dumps(user))
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setattr(store_remote, "FIRST_CONTACT_S", 0.1)
    rewrite(remote, signed(remote, foreign(remote, recorder), uri="gs://bucket/run", environment={}))
    command = ("contribution", remote.file(), "--allow-local")
    nowhere = {"storage.googleapis.com": "127.0.0.2", "accounts.google.com": "127.0.0.2"}
    with forward_proxy(nowhere) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        refused(cli(*command), "gs://bucket/run")
        assert set(proxy.passed) == {"CONNECT storage.googleapis.com:443"}
        cli(*command, "--use-my-aws")
        assert "CONNECT accounts.google.com:443" in proxy.passed, "where one's own credentials may be used"


@pytest.mark.parametrize("uri", ["s3", "gateway"])
@pytest.mark.parametrize("fault", ["unsigned", "changed", "another's"])
def test_nothing_arrives_for_an_invitation_whose_signature_does_not_hold(
    cli, remote: OwnedRun, recorder: Recorder, trains, fault: str, uri: str
) -> None:
    invitation = foreign(remote, recorder)
    if uri == "gateway":
        invitation = signed(remote, invitation, uri=f"gateway+{recorder.url}/run", environment={})
    changes = {
        "unsigned": {"signature": None},
        "changed": {"expires_at": invitation.expires_at + 1},
        "another's": {"signature": invitation.model_copy(update={"site": "bob"}).signature, "site": "carol"},
    }
    rewrite(remote, invitation.model_copy(update=changes[fault]))
    for command in ways(remote):
        refused(cli(*command), "forged or was changed")
    assert recorder.came == [] and trains() == []
