"""Fixtures of tests that run over every platform: an empty loopback for a module, a client and a stage for a test."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from composer_prime.executors.base import Executor
from tests.executors.jobs import Stage
from tests.executors.platforms import LoopbackPlatform
from tests.executors.registry import PLATFORM_PARAMS, loopback


@pytest.fixture(scope="module", params=PLATFORM_PARAMS)
def platform(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackPlatform]:
    with closing(loopback(request.param, tmp_path_factory.mktemp(request.param))) as opened:
        yield opened


@pytest.fixture
def taking(platform: LoopbackPlatform) -> LoopbackPlatform:
    """One that ends a job whose machine it takes back."""
    if _replaces(platform):
        pytest.skip(f"{platform.name} gives such a job another machine")
    return platform


@pytest.fixture
def replacing(platform: LoopbackPlatform) -> LoopbackPlatform:
    """One that starts a job whose machine it takes back on another one by itself."""
    if not _replaces(platform):
        pytest.skip(f"on {platform.name} such a job has ended")
    return platform


def _replaces(platform: LoopbackPlatform) -> bool:
    return getattr(platform, "replaces_machines", False)


@pytest.fixture
def executor(platform: LoopbackPlatform) -> Iterator[Executor]:
    with closing(platform.executor()) as opened:
        yield opened


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Stage:
    return Stage(tmp_path / "stage", request.function.__name__.removeprefix("test_"))
