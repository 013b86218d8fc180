"""A server with two engines, the policy's and the frozen one's: how they start and end together."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_prime.sites.embedded.inference.app import Server
from composer_prime.sites.embedded.inference.serve import close_engines, make_engine, make_teacher, start_engines
from composer_prime.teachers.served import held_name
from tests.sites.letters_site import letters_site
from tests.sites.tiny_folder import save_random_tiny
from tiny_policy.qwen3 import tiny_tokenizer


class FakeEngine:
    """Does as it is told when it starts and when it is closed."""

    def __init__(self, start: Callable[[], Any] = lambda: None, close: Callable[[], Any] = lambda: None) -> None:
        self._start, self._close = start, close
        self.is_closed = False

    async def start(self) -> None:
        self._start()

    async def close(self) -> None:
        self.is_closed = True
        self._close()


def fail() -> None:
    raise OSError("no more")


def server_of(*engines: Any) -> Server:
    return Server(engines[0], "policy", tiny_tokenizer(), {held_name("policy", "frozen"): engines[1]})


def test_a_server_is_ready_once_both_engines_have_started(run_async) -> None:
    engines: Any = FakeEngine(), FakeEngine()
    server = server_of(*engines)
    run_async(start_engines(engines, server, lambda: None, lambda error: server.fail()))
    assert server.is_ready


def test_a_server_is_not_ready_when_one_engine_fails_while_the_other_starts(run_async) -> None:
    engines: Any = FakeEngine(), FakeEngine(start=lambda: server.fail())
    server = server_of(*engines)
    run_async(start_engines(engines, server, lambda: None, lambda error: server.fail()))
    assert not server.is_ready


@pytest.mark.parametrize("bad", [0, 1])
def test_both_engines_are_closed_also_where_one_fails_at_it(run_async, bad: int) -> None:
    engines: Any = [FakeEngine(), FakeEngine()]
    engines[bad] = FakeEngine(close=fail)
    with pytest.raises(OSError, match="no more"):
        run_async(close_engines(engines))
    assert [engine.is_closed for engine in engines] == [True, True]


def test_both_engines_take_the_sites_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_async) -> None:
    settings = letters_site(
        tmp_path / "out", model_dir=save_random_tiny(tmp_path / "model"), site={"threads": 3}, hints={}
    )
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)

    async def start() -> None:
        engines = [make_engine(settings, lambda error: None), *make_teacher(settings, lambda error: None).values()]
        try:
            await asyncio.gather(*(engine.start() for engine in engines))
        finally:
            await close_engines(engines)

    run_async(start())
    assert seen == [3, 3]
