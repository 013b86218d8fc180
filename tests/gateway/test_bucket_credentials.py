"""The same malicious site with credentials of the bucket itself, a member's or a guest's of infra/bucket, on moto.

moto enforces actions and resources of a user's policies, deletes included. It evaluates no conditions (ListBucket's
prefix, If-None-Match) and no bucket policy: those parts are judged by tests/infra/test_bucket.py alone. SeaweedFS'
`mini` server gives every key all rights, so nothing of this can be tried there.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

import httpx
import pytest
from botocore.exceptions import ClientError
from botocore.session import Session

from composer_prime.errors import StoreUnusable
from composer_prime.plan.traffic import measure
from composer_prime.store import keys, open_store, probe_store
from composer_prime.volunteers.credentials import rights_fault
from tests.gateway.test_policy import OTHERS, OWN
from tests.infra.policies import FOLDER
from tests.servers import S3Server, moto_server

pytestmark = pytest.mark.s3
RUN = "runs/run-1"
SHARED = {"manifest", "founding", "close", "commit", "part", "merged payload", "master"}
"""Kinds that any member may create, and no guest."""
NOTHING = {"create": 403, "put": 403, "delete": 403}
Servers = tuple[S3Server, S3Server, S3Server]


@contextmanager
def enforcing(folder: Path) -> Iterator[Servers]:
    """(as an administrator, as site alice, as guest carol) a moto server that checks who asks for what."""
    with moto_server.running(folder) as server:
        iam = Session().create_client(
            "iam",
            endpoint_url=server.endpoint,
            region_name="us-east-1",
            aws_access_key_id="admin",
            aws_secret_access_key="admin",
        )
        users = {}
        policies = {"admin": EVERYTHING, "alice": rights("site", "alice"), "carol": rights("guest", "carol")}
        for name, policy in policies.items():
            iam.create_user(UserName=name)
            iam.put_user_policy(UserName=name, PolicyName="rights", PolicyDocument=json.dumps(policy))
            key = iam.create_access_key(UserName=name)["AccessKey"]
            users[name] = replace(server, access_key=key["AccessKeyId"], secret_key=key["SecretAccessKey"])
        iam.close()
        httpx.post(f"{server.endpoint}/moto-api/reset-auth", content=b"0", trust_env=False).raise_for_status()
        yield users["admin"], users["alice"], users["carol"]


EVERYTHING = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}


def rights(kind: str, name: str) -> Any:
    """The policy for one site. moto knows only one wildcard, so '?' becomes its regular expression's own."""
    text = (FOLDER / f"{kind}-policy.json").read_text()
    return json.loads(Template(text).substitute(BUCKET=moto_server.BUCKET, RUN=RUN, SITE=name).replace("?", "."))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with enforcing(tmp_path_factory.mktemp("moto-iam")) as users:
        yield users


class Client:
    """Plain requests with one user's credentials."""

    def __init__(self, server: S3Server) -> None:
        self._client = server.client()

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        self._client.put_object(Bucket=moto_server.BUCKET, Key=name, Body=data, **condition)

    def get(self, name: str) -> bytes:
        return self._client.get_object(Bucket=moto_server.BUCKET, Key=name)["Body"].read()

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=moto_server.BUCKET, Key=name)

    def close(self) -> None:
        self._client.close()


def client(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Client:
    for variable, value in server.environment().items():
        monkeypatch.setenv(variable, value)
    return Client(server)


def status(act: Callable[[], object]) -> int:
    """200, or the status with which the server refuses."""
    try:
        act()
    except ClientError as error:
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
    return 200


def tried(alice: Client, key: str) -> dict[str, int]:
    """What becomes of each write at a key of the run."""
    name = f"{RUN}/{key}"
    return {
        "create": status(lambda: alice.put(name, b"{}", if_absent=True)),
        "put": status(lambda: alice.put(name, b"{}")),
        "delete": status(lambda: alice.delete(name)),
    }


def test_a_site_s_credentials_write_its_own_names_alone_and_delete_nothing(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, alice = (client(server, monkeypatch) for server in servers[:2])
    for kind, (make, _) in OWN.items():
        assert tried(alice, make("alice")) == {"create": 200, "put": 200, "delete": 403}, kind
        for other in ("a", "bob", "alice-2"):
            assert tried(alice, make(other)) == NOTHING, (kind, other)
    admin.put(f"{RUN}/{keys.manifest()}", b"{}")
    assert status(lambda: alice.get(f"{RUN}/{keys.manifest()}")) == 200
    for each in (admin, alice):
        each.close()


def test_a_site_s_credentials_admit_nobody_and_touch_no_other_run(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, alice = (client(server, monkeypatch) for server in servers[:2])
    for kind, key in OTHERS.items():
        found = tried(alice, key)
        if kind == "probe":
            assert found == {"create": 200, "put": 200, "delete": 200}
        elif kind in SHARED:
            assert found["delete"] == 403, kind
        else:
            assert found == NOTHING, kind
    for name in ("runs/run-10/manifest.json", "runs/run-1x", "manifest.json", "runs/run-2/sites/alice/000000/beat"):
        assert status(lambda name=name: alice.put(name, b"x")) == 403, name
        assert status(lambda name=name: alice.get(name)) == 403, name
    for each in (admin, alice):
        each.close()


def test_a_guest_s_credentials_write_its_own_names_and_nothing_that_others_need(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, carol = (client(server, monkeypatch) for server in (servers[0], servers[2]))
    for kind, (make, _) in OWN.items():
        assert tried(carol, make("carol")) == {"create": 200, "put": 200, "delete": 403}, kind
        for other in ("a", "alice", "carol-2"):
            assert tried(carol, make(other)) == NOTHING, (kind, other)
    assert set(OTHERS) >= SHARED
    for kind, key in OTHERS.items():
        assert tried(carol, key) == NOTHING, kind
    assert tried(carol, keys.probe("7-ab", "carol")) == dict.fromkeys(NOTHING, 200)
    for other in ("a", "alice", "carol-2"):
        assert tried(carol, keys.probe("7-ab", other)) == NOTHING, other
    for name in ("runs/run-10/manifest.json", "manifest.json", f"runs/run-2/{keys.beat('carol', 0)}"):
        assert status(lambda name=name: carol.put(name, b"x")) == 403, name
    for each in (admin, carol):
        each.close()


def test_a_guest_tries_the_store_and_the_link_below_its_own_name(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in servers[2].environment().items():
        monkeypatch.setenv(variable, value)
    with closing(open_store(f"s3://{moto_server.BUCKET}/{RUN}")) as store:
        probe_store(store, site="carol")
        assert measure(store, "carol").up_mbit is not None
        with pytest.raises(StoreUnusable, match="probe/alice/"):
            probe_store(store, site="alice")


# --- what the owner is told of credentials that go into an invitation -------------------------------------------------


@pytest.mark.parametrize(
    ("user", "guest", "said"),
    [
        (0, True, "may write admissions/"),
        (0, False, "may write admissions/"),
        (1, True, "may write manifest.json, as a member does"),
        (1, False, None),
        (2, True, None),
    ],
    ids=["all rights, guest", "all rights, member", "a member's, guest", "a member's, member", "a guest's, guest"],
)
def test_credentials_that_may_write_more_than_their_role_are_told_and_nothing_changes(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, user: int, guest: bool, said: str | None
) -> None:
    admin = client(servers[0], monkeypatch)
    records = {f"{RUN}/{key}": key.encode() for key in (keys.manifest(), keys.admission(1), keys.admission(2))}
    for name, data in records.items():
        admin.put(name, data)
    for variable, value in servers[user].environment().items():
        monkeypatch.setenv(variable, value)
    with closing(open_store(f"s3://{moto_server.BUCKET}/{RUN}")) as store:
        before = store.list("")
        fault = rights_fault(store, guest=guest)
        assert store.list("") == before
    assert fault is None if said is None else said in (fault or "")
    assert {name: admin.get(name) for name in records} == records
    admin.close()
