"""Real tests start processes or servers, or wait. All others are refused that, so that `make test` stays quick.

A test is real by its own mark `real`, `slow` or `s3`, by its folder or file, by a fixture, or by the kind of store it is
given; the tables below say so for most. `pytest --quick` leaves them out, but for those of ALWAYS.
"""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

FOLDERS: tuple[str, ...] = ()
"""Folders and files of tests/ of which every test is real."""
FIXTURES: frozenset[str] = frozenset({"seaweed", "moto", "gcs", "rclone", "faulty"})
"""Fixtures that start processes or servers."""
KINDS: frozenset[str] = frozenset({"seaweed", "moto", "gcs", "rclone"})
"""Parameters that make `store_uri` start a server."""
MARKS = ("real", "slow", "s3")
ALWAYS: frozenset[str] = frozenset()
"""Real tests that `make test` runs too: one of each kind, all cases of it."""

MOST_SLEEP_S = 0.05

_refusing = False


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out real tests, but for those of tests/real.py's ALWAYS")


def guard() -> None:
    """Put a question before each act that only real tests may do."""
    _guard(subprocess.Popen, "__init__", "start a process", lambda popen, *given, **named: (given or [named.get("args")])[0])
    _guard(BaseProcess, "start", "start a process", lambda process: process.name)
    for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp"):
        _guard(os, name, "start a process", lambda *given, **named: name)
    for name, act in (("listen", "serve"), ("connect", "connect"), ("connect_ex", "connect")):
        _guard(socket.socket, name, act, _address)
    _guard(time, "sleep", f"sleep over {MOST_SLEEP_S * 1000:.0f} ms", lambda s: s, lambda s: s > MOST_SLEEP_S)


def _address(connection: socket.socket, *given: Any) -> object:
    return given[0] if given and not isinstance(given[0], int) else connection.family.name


def _guard(
    owner: Any, name: str, act: str, said: Callable[..., object], applies: Callable[..., bool] = lambda *_, **__: True
) -> None:
    """Make `owner.name` fail the test that calls it, if that one isn't real."""
    original = getattr(owner, name)

    def guarded(*given: Any, **named: Any) -> Any:
        if _refusing and applies(*given, **named):
            what = f"{act} ({said(*given, **named)})"
            pytest.fail(
                f"a test without the mark `real` must not {what}: give it pytest.mark.real, or add its folder, file or "
                "fixture to tests/real.py; make test leaves it to make test-all then"
            )
        return original(*given, **named)

    setattr(owner, name, guarded)


def is_real(item: pytest.Item) -> bool:
    """Whether a test may start processes and servers, and sleep."""
    if any(item.get_closest_marker(mark) for mark in MARKS):
        return True
    path = item.nodeid.split("::")[0].removeprefix("tests/")
    given = getattr(getattr(item, "callspec", None), "params", {}).values()
    return (
        any(path == folder or path.startswith(f"{folder}/") for folder in FOLDERS)
        or not FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        or any(isinstance(value, str) and value in KINDS for value in given)
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the tables name; with --quick, leave out what is real."""
    for item in items:
        if is_real(item):
            item.add_marker("real")
    if config.getoption("quick"):
        left = [item for item in items if item.get_closest_marker("real") and item.nodeid.split("[")[0] not in ALWAYS]
        gone = set(left)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left)


@contextmanager
def _refused(item: pytest.Item) -> Iterator[None]:
    global _refusing
    _refusing = item.get_closest_marker("real") is None
    try:
        yield
    finally:
        _refusing = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _refused(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _refused(item):
        return (yield)
