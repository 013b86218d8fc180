"""What tests of the Modal executor share: one loopback for a module, a client and a job of its own for a test."""

import itertools
import sys
import time
from collections.abc import Iterator

import pytest

from composer_prime.executors.base import Job, JobSpec, JobState, JobStatus
from composer_prime.executors.modal import ModalExecutor
from tests.executors.loopback_modal import LoopbackModal
from tests.patience import PATIENCE_S

SLEEP = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackModal]:
    platform = LoopbackModal(tmp_path_factory.mktemp("modal"))
    try:
        yield platform
    finally:
        platform.close()


@pytest.fixture
def executor(platform: LoopbackModal) -> ModalExecutor:
    return platform.executor()


@pytest.fixture
def spec() -> JobSpec:
    """A job that says hello, of a run of its own."""
    command = (sys.executable, "-c", "print('hello')")
    return JobSpec(run=f"run{next(_numbers)}", site="a", attempt=1, command=command, timeout_s=60, image="any")


def wait_for(executor: ModalExecutor, job: Job, *states: JobState) -> JobStatus:
    """Its status, once it is in one of `states`; final ones by default."""
    wanted = states or tuple(state for state in JobState if state.final)
    give_up_at = time.monotonic() + PATIENCE_S
    while (status := executor.poll(job)).state not in wanted:
        assert time.monotonic() < give_up_at, f"still {status}"
        time.sleep(0.1)
    return status
