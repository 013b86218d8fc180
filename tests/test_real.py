"""Tests that are not real are refused processes, servers and sleeps; the tables say which are real."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests import real


def connect() -> None:
    with socket.socket() as client:
        client.connect(("127.0.0.1", 1))


def serve() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()


ACTS: dict[str, tuple[Callable[[], object], str]] = {
    "a command": (lambda: subprocess.run([sys.executable, "-V"]), "start a process"),
    "a child of multiprocessing": (lambda: multiprocessing.Process().start(), "start a process"),
    "a fork": (os.fork, "start a process"),
    "a server": (serve, "serve"),
    "a connection": (connect, "connect (('127.0.0.1', 1))"),
    "a sleep": (lambda: time.sleep(0.06), "sleep over 50 ms (0.06)"),
}


@pytest.mark.parametrize("act", ACTS)
def test_each_act_of_a_real_test_is_refused_with_the_marks_name(act: str) -> None:
    do, said = ACTS[act]
    with real.refusing(), pytest.raises(pytest.fail.Exception) as refused:
        do()
    assert said in str(refused.value) and "pytest.mark.real" in str(refused.value)


def test_a_poll_and_a_pair_of_sockets_are_allowed() -> None:
    with real.refusing():
        time.sleep(0.001)
        for end in socket.socketpair():
            end.close()


@pytest.mark.parametrize(
    ("test", "is_named"),
    [
        ("tests/infra/test_docker.py::test_it", True),
        ("tests/infrared/test_it.py::test_it", False),
        ("tests/sync/test_ranks.py::test_it[two]", True),
        ("tests/sync/test_ranks_too.py::test_it", False),
        ("tests/store/test_keys.py::test_one[case]", True),
        ("tests/store/test_keys.py::test_one_more", False),
    ],
)
def test_a_table_names_folders_files_and_tests(test: str, is_named: bool) -> None:
    table = "\ninfra\nsync: late ranks\nstore/test_keys.py::test_one\n"
    assert real.named(test, real.paths(table)) == is_named
