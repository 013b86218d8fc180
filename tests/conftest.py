"""Fixtures that several rooms' tests share: real S3 servers, and fresh stores of every kind."""

import asyncio
import gc
import secrets
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import real
from tests.servers import S3Server, moto_server, weed

pytest_addoption = real.add_options


def pytest_configure(config: pytest.Config) -> None:
    real.guard()
    config.pluginmanager.register(real, "real")


settings.register_profile("composer-prime", deadline=None)  # a busy machine is no failure
settings.load_profile("composer-prime")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported for tests is garbage: looking for some among it took a quarter of collecting them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def an_event_loop_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """renderers has one asyncio lock a process, and a lock that was waited for stays with that event loop for good."""
    client = sys.modules.get("renderers.client")
    if client is not None:
        monkeypatch.setattr(client, "_max_prompt_len_lock", asyncio.Lock())


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`cli(command, ...)` runs ours in this process; its `command_line.Answer`."""
    from tests.cli.command_line import call  # loaded by those tests alone that want it

    return lambda *words: call(capsys, monkeypatch, *map(str, words))


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A SeaweedFS for the whole session, with the bucket `tests.servers.weed.BUCKET`."""
    with weed.seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A moto server for the whole session, with the bucket `tests.servers.moto_server.BUCKET`."""
    with moto_server.running(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def store_uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """`store_uri(kind)` is the URI of a fresh, empty store; kind: "memory", "file", "moto" or "seaweed".

    For the last two the server is started when it is first asked for, and the AWS variables point to it until the
    test ends (also in processes that the test starts); one test can so use only one of them.
    """

    def fresh(kind: str) -> str:
        name = secrets.token_hex(8)
        if kind == "memory":
            return f"memory://{name}"
        if kind == "file":
            return f"file://{tmp_path / name}"
        server: S3Server = request.getfixturevalue(kind)
        for variable, value in server.environment().items():
            monkeypatch.setenv(variable, value)
        return f"s3://{weed.BUCKET}/{name}"

    return fresh
