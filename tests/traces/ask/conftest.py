"""Text teachers on loopback, and asking them without waits between tries."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.traces.ask import pace, teacher
from composer_prime.traces.ask.asking import ask
from composer_prime.traces.ask.plan import Choice, make_plan
from composer_prime.traces.ask.report import Report
from composer_prime.traces.states import TraceState
from tests.traces.ask.text_teacher import FakeTextTeacher, Listed, serving

AMPLE_USD = 100.0


class Serve(Protocol):
    def __call__(self, fake: FakeTextTeacher, **settings: Any) -> TextTeacher: ...


class Ask(Protocol):
    def __call__(
        self, states: Iterable[TraceState], teachers: Sequence[TextTeacher], ceiling_usd: float = ..., **more: Any
    ) -> Report: ...


class DieAt(Protocol):
    def __call__(self, place: int, share: float) -> Mapping[str, str]: ...


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "RETRY_WAIT_S", 0.0)
    monkeypatch.setattr(pace, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(fake, name="cheap", ...)` starts a server, and gives the table that names it."""
    with ExitStack() as stack:
        yield lambda fake, **settings: fake.config(stack.enter_context(serving(fake)), **settings)


@pytest.fixture
def asking(tmp_path: Path) -> Callable[..., Report]:
    """`asking(states, teachers, ceiling_usd)` asks into the folder `answers` of the test."""

    def run(
        states: Iterable[TraceState],
        teachers: Sequence[TextTeacher],
        ceiling_usd: float = AMPLE_USD,
        choice: Choice | None = None,
        **more: Any,
    ) -> Report:
        store = Listed(list(states))
        return asyncio.run(ask(store, make_plan(store, choice), teachers, tmp_path / "answers", ceiling_usd, **more))

    return run


@pytest.fixture(scope="session")
def die_at(tmp_path_factory: pytest.TempPathFactory) -> DieAt:
    """`die_at(place, share)` is the environment of a process that dies within its nth change to answers.sqlite."""
    compiler = shutil.which("g++")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("dying at a write needs Linux and g++")
    source = Path(__file__).parent / "die_at_write.c"
    library = tmp_path_factory.mktemp("die_at_write") / "die_at_write.so"
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-O1", "-Wall", source, "-o", library, "-ldl"], check=True)
    return lambda place, share: {**os.environ, "LD_PRELOAD": str(library), "DIE_AT": f"{place} {share}"}
