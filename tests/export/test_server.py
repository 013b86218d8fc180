"""What a server is told when there are new weights, in which order, and what happens when it won't have them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_prime.errors import BadInput, SiteError
from composer_prime.export.server import ServerDown, WeightServer
from tests.export.fake_server import FakeServer, serving_fake
from tests.servers.weed import free_ports


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving_fake() as server:
        yield server


@pytest.fixture
def server(fake: FakeServer) -> Iterator[WeightServer]:
    told = WeightServer(fake.url)
    yield told
    told.close()


def test_it_pauses_updates_forgets_prompts_and_resumes(fake, server):
    server.update(Path("/weights/version_00000004"), 4)
    assert fake.asked == [
        ("/pause?mode=wait", None),
        ("/update_weights", {"weight_dir": "/weights/version_00000004", "version": 4}),
        ("/reset_prefix_cache", None),
        ("/resume", None),
    ]


def test_a_plain_vllm_reloads_through_its_workers(fake):
    plain = WeightServer(f"{fake.url}/v1", "vllm")
    plain.update(Path("/weights"), 4)
    assert fake.asked[1] == ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/weights"}})
    plain.close()


@pytest.mark.parametrize(
    ("status", "error"), [(500, ServerDown), (503, ServerDown), (400, SiteError), (404, SiteError)]
)
def test_a_server_that_fails_at_the_weights_is_resumed(fake, server, status, error):
    fake.statuses["/update_weights"] = status
    with pytest.raises(error, match=f"{status}") as found:
        server.update(Path("/weights"), 1)
    assert type(found.value) is error and '{"said": "as told"}' in str(found.value)
    assert fake.paths() == ["/pause?mode=wait", "/update_weights", "/resume"]


def test_a_server_without_pause_or_prompt_cache_takes_weights_too(fake, server, caplog):
    fake.statuses |= {"/pause": 404, "/resume": 404, "/reset_prefix_cache": 404}
    with caplog.at_level("INFO", logger="composer_prime.export.server"):
        server.update(Path("/weights"), 1)
        server.update(Path("/weights"), 2)
    assert fake.paths().count("/update_weights") == 2
    assert [record.message for record in caplog.records if "VLLM_SERVER_DEV_MODE" in record.message] == [
        f"server={fake.url} has no /reset_prefix_cache: a vLLM needs VLLM_SERVER_DEV_MODE=1 for it"
    ]


def test_a_server_that_is_not_there_is_down(fake):
    (port,) = free_ports(1)
    gone = WeightServer(f"http://127.0.0.1:{port}")
    assert not gone.is_ready() and gone.held_version() is None
    with pytest.raises(ServerDown, match=r"didn't answer /pause \(ConnectError\)"):
        gone.update(Path("/weights"), 1)
    gone.close()
    other = WeightServer(fake.url)
    assert other.is_ready() and other.held_version() is None
    fake.statuses["/health"] = 503
    assert not other.is_ready()
    other.close()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://here", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(BadInput, match="--server"):
        WeightServer(url)
