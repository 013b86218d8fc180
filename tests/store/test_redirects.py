"""Reads that are answered by 302, as Hugging Face's S3 endpoint answers them: followed, without what was signed."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from composer_prime.errors import KeyMissing, StoreError
from composer_prime.gateway.client import MAX_HOPS, Answered, Astray, GatewayClient, Place, next_url
from composer_prime.gateway.operations import tickets_of
from composer_prime.gateway.store import GatewayStore
from composer_prime.gateway.wire import Ticket
from composer_prime.store import keys, open_store, remote
from composer_prime.store.base import Store
from composer_prime.store.obstore import HF_ENDPOINT_VARIABLE
from tests.gateway.guarded import KEYS, guarding, make_run
from tests.servers import S3Server
from tests.servers.redirecting import Redirecting, redirecting

DATA = bytes(range(256)) * 4096
SECRETS = ("authorization", "x-amz-security-token", "cookie")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 1.0)
    monkeypatch.setattr(remote, "FIRST_CONTACT_S", 5.0)


@pytest.fixture
def bucket(store_uri: Callable[[str], str]) -> str:
    """A fresh bucket of the real server."""
    return store_uri("seaweed").removeprefix("s3://")


@pytest.fixture
def front(bucket: str, seaweed: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Redirecting]:
    """The endpoint that redirects, as the one of Hugging Face and of AWS."""
    with redirecting(seaweed.endpoint) as scene:
        monkeypatch.setenv("AWS_ENDPOINT_URL", scene.url)
        monkeypatch.setenv(HF_ENDPOINT_VARIABLE, scene.url)
        yield scene


@pytest.fixture(params=["direct", "presigned"])
def store(request: pytest.FixtureRequest, bucket: str, front: Redirecting) -> Iterator[Store]:
    """The bucket with its keys, and the same one behind a gateway that hands out presigned URLs."""
    with closing(open_store(f"hf://buckets/composer/{bucket}")) as opened:
        if request.param == "direct":
            yield opened
            return
        front.spares_owner = True
        make_run(opened)
        with guarding(opened) as gateway, closing(gateway.store("alice", inline_bytes=0)) as alice:
            yield alice


@pytest.fixture
def key(store: Store, bucket: str) -> str:
    """An object of the store that its reader gets from the bucket itself."""
    owned = keys.payload(0, 0, "a", "0" * 64)
    with closing(open_store(f"hf://buckets/composer/{bucket}")) as owner:
        owner.put(owned, DATA)
    return owned


@pytest.mark.s3
def test_a_redirected_read_gets_the_bytes_and_the_edge_sees_nothing_that_was_signed(
    store: Store, key: str, front: Redirecting
) -> None:
    assert store.get(key) == DATA
    assert store.get_range(key, 1000, 500) == DATA[1000:1500]
    reader = "httpx" if isinstance(store, GatewayStore) else "object_store"
    came = [request for request in front.came if reader in request["user-agent"]]
    assert len(came) == 2 and came[1]["range"] == "bytes=1000-1499"
    assert not any(name in request for request in front.came for name in SECRETS)


@pytest.mark.s3
def test_what_is_not_there_is_missing_as_ever_and_a_span_beyond_the_end_is_empty(store: Store, key: str) -> None:
    with pytest.raises(KeyMissing):
        store.get(keys.payload(0, 0, "a", "1" * 64))
    assert store.get_range(key, len(DATA) + 5, 10) == b""


@pytest.mark.s3
def test_an_edge_that_is_the_endpoint_itself_gives_the_bytes_too(store: Store, key: str, front: Redirecting) -> None:
    """There a client keeps its Authorization."""
    front.at_home = True
    assert store.get(key) == DATA and store.get_range(key, 1000, 500) == DATA[1000:1500]


@pytest.mark.s3
def test_an_edge_s_refusal_is_no_word_on_the_object_or_the_keys(store: Store, key: str, front: Redirecting) -> None:
    for status in (403, 404):
        front.fault = status
        with pytest.raises(StoreError, match=rf"(?:answers|answer from .*\() ?{status}") as caught:
            store.get(key)
        assert not isinstance(caught.value, KeyMissing)
    front.fault = 0
    assert store.get(key) == DATA


@pytest.mark.s3
def test_redirects_without_end_are_given_up(store: Store, key: str, front: Redirecting) -> None:
    front.loops = True
    with pytest.raises(StoreError, match=rf"more than {MAX_HOPS} redirects \(302\)|following redirect"):
        store.get(key)


@pytest.mark.s3
def test_a_write_is_not_redirected(bucket: str, front: Redirecting) -> None:
    front.redirects_writes = True
    with closing(open_store(f"hf://buckets/composer/{bucket}")) as store:
        with pytest.raises(StoreError, match=r"put of key in .* failed: .*302"):
            store.put("key", DATA)
        tickets = tickets_of(store)
        assert tickets is not None
        ticket = tickets.to_write("key", len(DATA), hashlib.sha256(DATA).digest(), if_absent=False)
    client = GatewayClient(Place("http://127.0.0.1:9", "run"), KEYS["alice"])
    with closing(client), pytest.raises(Answered) as caught:
        client.send(ticket, DATA, 30)
    assert caught.value.status == 302 and not front.came


@pytest.mark.parametrize(
    ("url", "location", "target"),
    [
        ("https://s3.hf.co/org/b/k", "https://edge.example/x?sig=1", "https://edge.example/x?sig=1"),
        ("https://s3.hf.co/org/b/k", "/elsewhere", "https://s3.hf.co/elsewhere"),
        ("http://127.0.0.1:1/b/k", "http://127.0.0.1:2/x", "http://127.0.0.1:2/x"),
        ("http://127.0.0.1:1/b/k", "https://edge.example/x", "https://edge.example/x"),
    ],
)
def test_where_a_redirect_leads(url: str, location: str, target: str) -> None:
    assert next_url(url, location, 0) == target


@pytest.mark.parametrize("location", ["http://edge.example/x?sig=secret", "ftp://edge.example/x", "file:///etc/x", ""])
def test_https_stays_https_and_the_refusal_holds_no_address(location: str) -> None:
    with pytest.raises(Astray, match="redirect") as caught:
        next_url("https://s3.hf.co/org/b/k", location, 0)
    assert "edge" not in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize("own", ["http://169.254.169.254/latest", "https://192.168.1.1/x", "https://nas.local/x"])
def test_nobody_is_sent_from_the_internet_to_an_address_of_their_own_network(own: str) -> None:
    with pytest.raises(Astray, match="own network"):
        next_url("http://bucket.example.com/key", own, 0)
    assert next_url("http://127.0.0.1:9000/key", own, 0) == own, "who is there already may be"
    with closing(GatewayClient(Place("http://gateway.example.com", "run"), KEYS["alice"])) as client:
        for act in (lambda: client.fetch(Ticket(own), 1.0), lambda: client.send(Ticket(own), b"", 1.0)):
            with pytest.raises(StoreError, match="an address of one's own network: refused"):
                act()
