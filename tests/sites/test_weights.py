"""How new weights get from the trainer's folder to the inference server."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config import SitePaths
from composer_prime.errors import SiteError
from composer_prime.sites.embedded import inference_client
from composer_prime.sites.embedded.inference_client import InferenceClient, WeightsWatcher, newest_broadcast
from tests.patience import PATIENCE_S
from tests.servers.fake_inference import FakePolicy, serving
from tests.sites.letters_site import letters_site

RunAsync = Callable[[Coroutine[Any, Any, Any]], Any]


def publish(paths: SitePaths, version: int, *, stable: bool = True) -> Path:
    folder = paths.broadcast(version)
    folder.mkdir(parents=True)
    if stable:
        (folder / "STABLE").touch()
    return folder


def test_the_newest_broadcast_is_the_highest_version_that_is_complete(tmp_path: Path) -> None:
    paths = letters_site(tmp_path).paths
    assert newest_broadcast(paths) is None
    publish(paths, 9)
    newest = publish(paths, 10)
    publish(paths, 11, stable=False)
    assert newest_broadcast(paths) == (10, newest)


def test_a_broadcast_from_before_this_start_does_not_count(tmp_path: Path) -> None:
    paths = letters_site(tmp_path).paths
    old, new = publish(paths, 5), publish(paths, 2)
    os.utime(old / "STABLE", (100.0, 100.0))
    assert newest_broadcast(paths, since=200.0) == (2, new)


def test_overtaken_weights_are_skipped_and_waiters_wake_up(tmp_path: Path, run_async: RunAsync) -> None:
    async def follow() -> int:
        async with InferenceClient(f"http://127.0.0.1:{port}") as inference:
            watcher = WeightsWatcher(paths, inference, version=0)
            following = asyncio.create_task(watcher.follow())
            version = await asyncio.wait_for(watcher.at_least(2), PATIENCE_S)
            following.cancel()
            return version

    paths, policy = letters_site(tmp_path).paths, FakePolicy()
    publish(paths, 2)
    newest = publish(paths, 3)
    with serving(policy) as port:
        assert run_async(follow()) == 3
    assert policy.updates == [(3, str(newest))]


def test_refused_weights_are_offered_again_but_not_for_ever(
    tmp_path: Path, run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def follow(seconds: float) -> None:
        monkeypatch.setattr(inference_client, "UPDATE_PATIENCE_S", seconds)
        async with InferenceClient(f"http://127.0.0.1:{port}") as inference:
            watcher = WeightsWatcher(paths, inference, version=0)
            asyncio.get_running_loop().call_later(0.3, setattr, policy, "refusing", seconds < 1)
            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
                following = group.create_task(watcher.follow())
                await watcher.at_least(1)
                following.cancel()

    paths, policy = letters_site(tmp_path).paths, FakePolicy(refusing=True)
    publish(paths, 1)
    with serving(policy) as port:
        with pytest.raises(ExceptionGroup) as caught:
            run_async(follow(0.2))
        assert caught.group_contains(SiteError, match=r"has refused new weights for 0.2 s, last with .*503")
        assert policy.updates == []
        run_async(follow(PATIENCE_S))
    assert [version for version, _ in policy.updates] == [1]


def test_a_server_that_does_not_come_up_is_named(run_async: RunAsync) -> None:
    async def wait() -> None:
        async with InferenceClient("http://127.0.0.1:9") as inference:
            await inference.wait_ready(timeout_s=0.2)

    with pytest.raises(SiteError, match=r"the inference server at http://127.0.0.1:9 wasn't healthy within 0.2 s"):
        run_async(wait())
