"""Tiny jobs that signal through files, so that tests wait for events and never sleep through a guess."""

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from composer_prime.executors.base import Executor, Job, JobSpec, JobState, JobStatus, Secrets
from tests.patience import PATIENCE_S, wait_until

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 600

PREAMBLE = """
import os, pathlib, signal, subprocess, sys, time
HERE = pathlib.Path(sys.argv[1])
def mark(name, text="."):
    new = HERE / (name + ".new." + str(os.getpid()))
    new.write_text(text, encoding="utf-8")
    new.rename(HERE / name)
def wait(name):
    until = time.monotonic() + 600
    while not (HERE / name).exists():
        time.sleep(0.01)
        if time.monotonic() > until:
            sys.exit("nobody marked " + name)
def say(text):
    print(text, flush=True)
def count(name):
    with open(HERE / name, "a") as file:
        file.write("x")
"""
"""What every job's program begins with: HERE is the stage's folder."""

FOREVER = "wait('never')"


class Stage:
    """A run of one test: its name, and the folder through which its jobs and the test signal."""

    _numbers = itertools.count()

    def __init__(self, folder: Path, test: str) -> None:
        self.folder = folder
        self.run = f"{re.sub('[^a-z0-9]+', '-', test.lower())[:24].strip('-')}-{next(self._numbers)}"
        folder.mkdir(parents=True, exist_ok=True)

    def spec(
        self,
        code: str,
        site: str = "a",
        attempt: int = 1,
        *,
        run: str = "",
        arguments: tuple[str, ...] = (),
        timeout_s: int = TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        caches: Mapping[str, str] | None = None,
    ) -> JobSpec:
        """A job that runs `code` after the preamble."""
        return JobSpec(
            run=run or self.run,
            site=site,
            attempt=attempt,
            command=(sys.executable, "-c", PREAMBLE + code, str(self.folder), *arguments),
            timeout_s=timeout_s,
            env=env or {},
            secrets=Secrets(secrets or {}),
            image="any",
            caches=caches or {},
        )

    def mark(self, name: str) -> None:
        """What a job's `wait(name)` waits for."""
        (self.folder / name).write_text(".")

    def await_mark(self, name: str) -> str:
        """What a job's `mark(name, text)` said, once it did."""
        wait_until((self.folder / name).exists, f"mark {name}")
        return (self.folder / name).read_text(encoding="utf-8")

    def counted(self, name: str = "starts") -> int:
        """How often jobs called `count(name)`."""
        path = self.folder / name
        return len(path.read_text()) if path.exists() else 0


def await_end(executor: Executor, job: Job) -> JobStatus:
    """The job's final status."""
    deadline = time.monotonic() + PATIENCE_S
    while not (status := executor.poll(job)).state.final:
        assert time.monotonic() < deadline, f"{job.id} still runs: {status}"
        time.sleep(0.02)
    return status


def await_running(executor: Executor, job: Job) -> JobStatus:
    """The job's status once it runs."""
    deadline = time.monotonic() + PATIENCE_S
    while (status := executor.poll(job)).state is JobState.PENDING:
        assert time.monotonic() < deadline, f"{job.id} doesn't start: {status}"
        time.sleep(0.02)
    assert status.state is JobState.RUNNING, status
    return status


def run_to_end(executor: Executor, spec: JobSpec) -> tuple[Job, JobStatus]:
    """Submit, and wait for the end."""
    job = executor.submit(spec)
    return job, await_end(executor, job)


FRESH = """
import sys
from pathlib import Path
from composer_prime.executors.base import Job, JobSpec
from composer_prime.executors.open import open_executor
from composer_prime.executors.base import Secrets
executor = open_executor(sys.argv[1])
"""
"""What a fresh process's program begins with."""


@contextmanager
def fresh_process(
    option: str, environment: Mapping[str, str], code: str, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that opens the platform anew, as `executor`, and runs `code`; killed if still there."""
    process = subprocess.Popen(
        [sys.executable, "-c", FRESH + code, option, *arguments],
        env={**os.environ, **environment},
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
