"""The measured link: what the store lets through, within bounds, and nothing left behind."""

import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler

import pytest

from composer_prime.errors import StoreError
from composer_prime.store.memory import MemoryStore
from composer_prime.store.throttled import BYTES_PER_MBIT
from composer_prime.volunteers.link import MOST_BYTES, clock_ahead_s, endpoint_of, measure
from tests.servers.in_thread import serving_handler

SERVER_AHEAD_S = 1000


class SlowStore(MemoryStore):
    """A store at the end of a link: its time passes with what is moved."""

    def __init__(self, name: str, up_mbit: float, down_mbit: float, delay_s: float = 0.05) -> None:
        super().__init__(name)
        self.now, self.moved, self._delay_s = 0.0, 0, delay_s
        self._rates = {"up": up_mbit * BYTES_PER_MBIT, "down": down_mbit * BYTES_PER_MBIT}

    def _pass(self, way: str, num_bytes: int) -> None:
        self.now += self._delay_s + num_bytes / self._rates[way]
        self.moved += num_bytes

    def put(self, key, data) -> None:
        self._pass("up", len(data))
        super().put(key, data)

    def get(self, key) -> bytes:
        data = super().get(key)
        self._pass("down", len(data))
        return data

    def get_range(self, key, start, length) -> bytes:
        data = super().get(key)[start : start + length]
        self._pass("down", len(data))
        return data

    def list(self, prefix) -> list[str]:
        self.now += self._delay_s
        return super().list(prefix)


@pytest.mark.parametrize(("up", "down"), [(0.5, 2.0), (10.0, 50.0), (40.0, 40.0)])
def test_the_rates_are_those_of_the_link(up: float, down: float, request: pytest.FixtureRequest) -> None:
    store = SlowStore(request.node.name, up, down)
    link = measure(store, clock=lambda: store.now)
    assert link.up_mbit == pytest.approx(up, rel=0.2) and link.down_mbit == pytest.approx(down, rel=0.3)
    assert link.delay_s == pytest.approx(0.05) and store.now < 10
    assert store.list("") == [] and store.moved <= 3 * MOST_BYTES


class Guarded(SlowStore):
    def put(self, key, data) -> None:
        raise StoreError("the gateway says: not your object")


def test_a_store_that_takes_no_trials_is_only_read_from(request: pytest.FixtureRequest) -> None:
    store = Guarded(request.node.name, 10.0, 50.0)
    assert measure(store, clock=lambda: store.now).down_mbit is None
    MemoryStore.put(store, "masters/0000/00000000-0123456789abcdef", bytes(2**20))
    link = measure(store, clock=lambda: store.now)
    assert link.up_mbit is None and "not your object" in link.problem
    assert link.down_mbit == pytest.approx(50.0, rel=0.3)


def test_where_nothing_is_written_a_slow_link_fetches_no_more_than_tells_its_rate(
    request: pytest.FixtureRequest,
) -> None:
    store = Guarded(request.node.name, 10.0, 10.0)
    MemoryStore.put(store, "masters/0000/00000000-0123456789abcdef", bytes(2**23))
    assert measure(store, clock=lambda: store.now).down_mbit == pytest.approx(10.0, rel=0.1)
    assert store.moved < 1.4e6


class Dated(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response_only(403)
        self.send_header("Date", formatdate(self.server_time(), usegmt=True))
        self.end_headers()

    def server_time(self) -> float:
        return time.time() + SERVER_AHEAD_S


def test_the_clock_is_compared_with_the_servers_also_where_it_refuses_us() -> None:
    with serving_handler(Dated) as url:
        ahead_s = clock_ahead_s(url)
    assert ahead_s is not None and abs(ahead_s + SERVER_AHEAD_S) < SERVER_AHEAD_S / 2
    assert clock_ahead_s(url) is None, "nobody answers there any more"


def test_every_kind_of_store_has_its_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    assert endpoint_of("s3://bucket/run") == "https://s3.amazonaws.com"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:1")
    assert endpoint_of("s3://bucket/run") == "http://localhost:1"
    assert endpoint_of("gateway+https://host:8443/run") == "https://host:8443/health"
    assert endpoint_of("gateway+http://host/base/run") == "http://host/base/health"
    assert endpoint_of("/a/folder/run") is endpoint_of("file:///run") is None
