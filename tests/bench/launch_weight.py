"""How much code a launch goes through, and how long its dry run takes.

    python -m tests.bench.launch_weight [local ssh modal sky hf-jobs]

Lines of `executors/` and `launch/`; for each platform, on its loopback, the functions of ours that are entered from a
supervisor's first turn to the client's call that starts the first job, and those of them that wait for that call; and
seconds of `composer-prime launch --dry-run` as a process of its own.
"""

import argparse
import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import composer_prime
from composer_prime.launch.supervisor import Supervisor
from tests.executors.jobs import Stage
from tests.executors.registry import LOOPBACKS, loopback
from tests.executors.staged import LIMITS, StagedFleet, staged_plan

PACKAGE = Path(composer_prime.__file__).parent
RECIPE = PACKAGE.parent / "recipes/local/two_sites.toml"
CLIENTS = {
    "local": "subprocess.run",
    "ssh": "asyncssh.SSHClientConnection.run",
    "modal": "modal.Function.spawn",
    "sky": "httpx.Client.request",
    "hf-jobs": "huggingface_hub.HfApi.run_job",
}
"""What starts a job in each platform's client."""
STARTS = {"submit"}
"""Functions of ours on the way of a job's start, and of no other request."""


class Way:
    """The functions of ours from a supervisor's turn to a client's call."""

    def __init__(self, platform: str) -> None:
        self._client = CLIENTS[platform]
        self.entered: set[CodeType] = set()
        self.waiting: set[CodeType] = set()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Look at all calls within, until the client is asked to start a job."""
        owner, _, name = self._client.rpartition(".")
        module, _, kind = owner.rpartition(".")
        there: Any = importlib.import_module(module or owner)
        there = getattr(there, kind) if module else there
        threading.setprofile(self._look)
        with mock.patch.object(there, name, self._noting(vars(there)[name])):
            sys.setprofile(self._look)
            try:
                yield
            finally:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]

    def _noting(self, start: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            stack = set(_ours_below(sys._getframe()))
            if not self.waiting and any(each.co_name in STARTS for each in stack):
                self.waiting = stack
            if not inspect.isfunction(start):  # what binds itself in a way of its own
                return start.__get__(args[0], type(args[0]))(*args[1:], **kwargs)
            return start(*args, **kwargs)

        return noting

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and not self.waiting and _is_ours(frame.f_code):
            self.entered.add(frame.f_code)


def _ours_below(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        if _is_ours(frame.f_code):
            yield frame.f_code
        frame = frame.f_back


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<")


def lines_of(room: str) -> int:
    """Of all its Python files."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in (PACKAGE / room).rglob("*.py"))


def functions(name: str, folder: Path) -> tuple[int, int]:
    """(entered, waiting) for one job on a platform's loopback."""
    way = Way(name)
    with closing(loopback(name, folder)) as platform, closing(platform.executor()) as executor:
        stage = Stage(folder / "stage", "weight")
        fleet = StagedFleet(stage.folder, "say('up')", lambda on: executor)
        supervisor = Supervisor(fleet, staged_plan(platform.launch_option(), "a"), LIMITS, say=lambda line: None)
        with way.followed():
            supervisor.turn()
    return len(way.entered), len(way.waiting)


def dry_run_s(name: str) -> float:
    """Seconds of a dry run, the least of three."""
    on = "ssh:host" if name == "ssh" else name
    words = ["launch", str(RECIPE), "--on", f"{on},ssh:other" if name == "ssh" else on, "--dry-run", "--image", "any"]
    store = ["--outer.store", "s3://bucket/runs"]
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "composer_prime.cli.main", *words, *store], capture_output=True)
        taken.append(time.perf_counter() - began)
    return min(taken)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m tests.bench.launch_weight", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("platforms", nargs="*", default=[*LOOPBACKS], metavar="PLATFORM")
    args = parser.parse_args(arguments)
    rooms = {room: lines_of(room) for room in ("executors", "launch")}
    print(f"lines: {', '.join(f'{room} {lines:,}' for room, lines in rooms.items())}, {sum(rooms.values()):,} together")
    print(f"load average {os.getloadavg()[0]:.1f}")
    for name in args.platforms:
        with tempfile.TemporaryDirectory(prefix="weight-") as folder:
            entered, waiting = functions(name, Path(folder))
        print(
            f"{name:8} {entered:3} functions to the client's call, {waiting:2} of them wait for it; dry run "
            f"{dry_run_s(name):.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
