"""What tests that play real rollouts share: a tokenizer's folder, and one event loop for the whole session."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.fake_inference import save_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a renderer can load the tiny model's tokenizer from."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def run_async() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """`run_async(coroutine)`, on one loop for all: renderers' client has a lock that stays with the first."""
    with asyncio.Runner() as runner:
        yield runner.run
