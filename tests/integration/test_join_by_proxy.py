"""A volunteer whose machine has no way out but a proxy: `composer-prime join`, whole, until its work is merged.

Bucket and gateway are at an address that leads nowhere (TEST-NET-3); only the volunteer's proxy knows what stands
there. The owner's site has the bucket beside it.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from composer_prime.config import load_recipe
from composer_prime.config.paths import RunPaths
from composer_prime.metrics import read_tape
from composer_prime.store import Store, keys, open_store
from composer_prime.sync.signatures import SigningKey
from composer_prime.volunteers.contribution import contribution
from composer_prime.volunteers.host import Invitee, invite
from tests.integration.local_runs import started, wait_until
from tests.integration.test_volunteers import EXECUTABLE, SECRETS, write_recipe
from tests.servers import S3Server
from tests.servers.certificate import write_certificate
from tests.servers.forward_proxy import ForwardProxy, forward_proxy, tls_front
from tests.volunteers.owned_run import CONSENT

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.s3]
NOWHERE = "203.0.113.5"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@dataclass(frozen=True)
class Hosted:
    """A run that its owner's site trains, and the proxy of whoever is invited."""

    folder: Path
    store: Store
    owner: SigningKey
    recipe: Path
    proxy: ForwardProxy

    @property
    def bucket_port(self) -> int:
        return urlsplit(os.environ["AWS_ENDPOINT_URL"]).port or 0

    def invite(self, uri: str | None, environment: dict[str, str]) -> Path:
        """Alice's invitation, a guest's."""
        out = self.folder / "alice.invitation"
        invitee = Invitee("alice", int(time.time()) + 3600, guest=True, uri=uri, environment=environment)
        invite(self.store, self.owner, invitee, load_recipe(self.recipe, []), out)
        return out

    def join(self, invitation: Path, **environment: str) -> None:
        """Start alice with nothing but the proxy, and end her once some of her work is merged."""
        bare = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("AWS_") and name.upper() not in PROXIES
        }
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), self.proxy.url)
        log = self.folder / "join.log"
        command = ["env", "-i", *(f"{name}={value}" for name, value in (bare | proxies | environment).items())]
        command += [EXECUTABLE, "join", str(invitation), "--folder", str(self.folder / "alice"), *CONSENT]
        with started(command, log) as volunteer:
            wait_until(lambda: self.has_offered() and merged_tokens(self.store) > 0, volunteer, log)

    def has_offered(self) -> bool:
        """Whether a record of an offer of hers stands in the first fragment's rounds."""
        return any(
            keys.is_offer(key) and keys.offer_site(key) == "alice" for key in self.store.list(keys.rounds_prefix(0))
        )

    @property
    def played(self) -> list[dict[str, float]]:
        """What alice's orchestrator noted of each batch."""
        return read_tape(RunPaths(self.folder / "alice" / "two-sites").site("alice").tape("orchestrator"))


def merged_tokens(store: Store) -> int:
    """Of alice's, in masters."""
    return contribution(store, "alice").merged_tokens


@pytest.fixture
def hosted(tmp_path: Path, store_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosted]:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    uri, owner, log = store_uri("seaweed"), SigningKey.generate(), tmp_path / "a.log"
    changes: dict[str, object] = {"max_steps": 4000, "orchestrator.train.filter_zero_advantages": "false"}
    recipe = write_recipe(tmp_path, uri, owner, **changes)
    with (
        closing(open_store(f"{uri}/two-sites")) as store,
        forward_proxy({NOWHERE: "127.0.0.1"}) as proxy,
        started([EXECUTABLE, "site", str(recipe), "--site", "a"], log) as host,
    ):
        wait_until(lambda: bool(store.list(keys.manifest())), host, log)
        yield Hosted(tmp_path, store, owner, recipe, proxy)


def test_a_volunteer_contributes_to_a_bucket_that_only_its_proxy_reaches(hosted: Hosted) -> None:
    endpoint = f"http://{NOWHERE}:{hosted.bucket_port}"
    secrets = {name: os.environ[name] for name in (*SECRETS, "AWS_DEFAULT_REGION")}
    hosted.join(hosted.invite(None, {"AWS_ENDPOINT_URL": endpoint, **secrets}))
    assert hosted.played, "rollouts came from the site's own server"
    assert all(f" {endpoint}/" in line for line in hosted.proxy.passed), "and were not asked for at the proxy"
    assert {line.split()[0] for line in hosted.proxy.passed} == {"GET", "PUT", "DELETE", "HEAD"}
    offers = [line for line in hosted.proxy.passed if line.startswith("PUT ") and "/offers/alice.json" in line]
    assert offers, "the offer went by it as well"


def test_a_volunteer_contributes_by_a_gateway_through_tunnels_alone(hosted: Hosted, seaweed: S3Server) -> None:
    certificate, key = write_certificate(hosted.folder, NOWHERE, "127.0.0.1")
    log = hosted.folder / "gateway.log"
    with ExitStack() as stack:
        tls_port = stack.enter_context(tls_front(hosted.bucket_port, certificate, key))
        beside = stack.enter_context(forward_proxy({NOWHERE: "127.0.0.1"}))  # where presigned URLs shall lead
        command = ["env", f"AWS_ENDPOINT_URL=https://{NOWHERE}:{tls_port}", f"AWS_CA_BUNDLE={certificate}"]
        command += [f"HTTPS_PROXY={beside.url}", EXECUTABLE, "gateway", hosted.store.uri, "--port", "0"]
        command += ["--rate", "500"]
        gateway = stack.enter_context(started(command, log))
        wait_until(lambda: "sites use" in log.read_text(), gateway, log)
        listens = urlsplit(log.read_text().split("listening at ")[1].split()[0]).port
        assert listens is not None
        port = stack.enter_context(tls_front(listens, certificate, key))
        invitation = hosted.invite(f"gateway+https://{NOWHERE}:{port}/two-sites", {})
        hosted.join(invitation, SSL_CERT_FILE=certificate)
    assert hosted.played
    assert set(hosted.proxy.passed) == {f"CONNECT {NOWHERE}:{port}", f"CONNECT {NOWHERE}:{tls_port}"}
