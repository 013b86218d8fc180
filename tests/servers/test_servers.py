"""The servers that tests start end with the tests, however these end."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bench.storm import server as storm_server
from tests.bench.storm.server import StormServer
from tests.patience import PATIENCE_S, wait_until
from tests.servers import ServerFailed, process, weed
from tests.servers.weed import free_ports, seaweed, server_flags

REPOSITORY = Path(__file__).parents[2]


def test_server_and_what_it_started_are_gone_after_the_block(tmp_path: Path) -> None:
    shell = ["/bin/sh", "-c", "sleep 600 & echo started; wait"]
    log = tmp_path / "log"
    with process.serving(
        shell, log=log, is_ready=lambda: "started" in log.read_text(), environment={}, folder=tmp_path
    ) as pid:
        family = [psutil.Process(pid), *psutil.Process(pid).children()]
        assert len(family) == 2
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.parametrize(
    ("script", "cause"), [("echo oh; exit 3", "ended with code 3:\noh"), ("exec sleep 9", "not ready")]
)
def test_server_that_does_not_start_is_told_with_its_log(tmp_path: Path, script: str, cause: str) -> None:
    with (
        pytest.raises(ServerFailed, match=cause),
        process.serving(
            ["/bin/sh", "-c", script],
            log=tmp_path / "log",
            is_ready=lambda: False,
            environment={},
            folder=tmp_path,
            deadline_s=1.0,
        ),
    ):
        raise AssertionError("a server that isn't ready was yielded")


def test_free_ports_are_distinct_and_free_as_far_apart_as_asked() -> None:
    ports = free_ports(20, apart=10_000)
    assert len(set(ports)) == 20
    assert all(20_000 <= port < 32_000 for port in ports)


def sockets_outside(folder: Path, process: psutil.Process) -> set[Path]:
    """The unix sockets that a process has names for, none of them in `folder`."""
    named = {Path(str(end.laddr)) for end in process.net_connections("unix") if end.laddr}
    return {path for path in named if folder not in path.parents}


@pytest.mark.s3
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_killed_test_process_leaves_no_seaweed_and_none_of_its_sockets(tmp_path: Path) -> None:
    code = """if True:
        import sys, time
        from pathlib import Path
        from tests.servers.weed import seaweed
        with seaweed(Path(sys.argv[1])) as server:
            print(server.pid, flush=True)
            time.sleep(600)
    """
    tester = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    with tester:
        assert tester.stdout is not None
        server = psutil.Process(int(tester.stdout.readline()))
        assert "weed" in server.name()
        outside = sockets_outside(tmp_path, server)
        assert len(outside) >= 4
        os.kill(tester.pid, signal.SIGKILL)
    server.wait(timeout=PATIENCE_S)
    wait_until(lambda: not any(path.exists() for path in outside), "its sockets go")


@contextmanager
def storm_server_running(folder: Path) -> Iterator[None]:
    server = StormServer(folder)
    with closing(server):
        server.start()
        server.wait_ready()
        yield


@pytest.mark.s3
@pytest.mark.skipif(sys.platform != "linux", reason="what a server holds is read from /proc")
@pytest.mark.parametrize("taken", [False, True], ids=["its-ports", "one-port-taken"])
@pytest.mark.parametrize("start", [seaweed, storm_server_running])
def test_stopped_seaweed_leaves_no_socket(
    start: Callable[[Path], AbstractContextManager[Any]], taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a gRPC port that was taken since it was chosen, SeaweedFS takes the next, and its socket is named by that."""
    held = ExitStack()

    def flags_of_which_one_is_taken(*args: Any) -> dict[str, object]:
        flags = server_flags(*args)
        if taken:
            held.enter_context(socket.create_server(("127.0.0.1", int(str(flags["filer.port.grpc"])))))
        return flags

    for module in (weed, storm_server):
        monkeypatch.setattr(module, "server_flags", flags_of_which_one_is_taken)
    with held, start(tmp_path):
        children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]  # others'
        (server,) = (child for child in children if f"-dir={tmp_path / 'data'}" in child.cmdline())
        outside = sockets_outside(tmp_path, server)
        assert len(outside) >= 4
    assert not {path for path in outside if path.exists()}
