"""Containers of the loopback Modal are forked, yet processes of their own that are found, and end, as any others."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from composer_prime.executors.base import JobSpec, JobState
from tests.architecture import REPOSITORY
from tests.patience import wait_until

pytest.importorskip("modal")
from composer_prime.executors.modal.executor import ModalExecutor
from tests.executors import loopback_modal_fixtures as fixtures
from tests.executors.loopback_modal import LoopbackModal
from tests.executors.loopback_modal_fixtures import SLEEP, wait_for
from tests.executors.loopback_modal_nursery import BLANK, MARK, marked_pids

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the loopback finds a container's processes in /proc")
platform, executor, spec = fixtures.platform, fixtures.executor, fixtures.spec

CALLER = """
import signal, sys
from pathlib import Path
from composer_prime.executors.base import JobSpec
from tests.executors.loopback_modal import LoopbackModal
from tests.executors.loopback_modal_fixtures import SLEEP

platform = LoopbackModal(Path(sys.argv[1]))
executor = platform.executor()
job = executor.submit(JobSpec(run="any", site="a", attempt=1, command=SLEEP, timeout_s=60, image="any"))
next(executor.logs(job, follow=True))
(call,) = platform.calls(job)
print(call.container.task_id, flush=True)
signal.pause()
"""


def test_a_container_is_a_process_of_its_own_and_dies_by_the_signal_it_gets(
    platform: LoopbackModal, executor: ModalExecutor, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/of-this-container")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not for containers")
    print_variables = "import os; print(*sorted(os.environ), os.environ['TMPDIR'], os.getcwd(), flush=True)"
    job = executor.submit(replace(spec, command=(sys.executable, "-c", f"{print_variables}; {SLEEP[-1]}")))
    said = next(executor.logs(job, follow=True)).split()
    (call,) = platform.calls(job)
    container = call.container
    assert container
    (own,) = set(marked_pids(container.task_id)) - set(container.job_pids())
    place = str(platform._folder / container.task_id)
    assert (os.getsid(own), os.readlink(f"/proc/{own}/cwd")) == (own, place)
    assert said[-2:] == ["/of-this-container", place] and "AWS_SECRET_ACCESS_KEY" not in said
    # Neither the channel to who forked it, nor another container's output.
    descriptors = [os.readlink(path) for path in Path(f"/proc/{own}/fd").iterdir()]
    assert [path for path in descriptors if path.startswith("pipe:")].count(os.readlink(f"/proc/{own}/fd/1")) == 2
    assert os.readlink(f"/proc/{own}/fd/1") == os.readlink(f"/proc/{own}/fd/2")
    assert os.readlink(f"/proc/{own}/fd/0") == "/dev/null"
    os.kill(own, signal.SIGTERM)
    wait_until(lambda: container.exit_code is not None)
    assert container.exit_code == -signal.SIGTERM
    assert wait_for(executor, job).state is JobState.PREEMPTED  # the next container says so
    assert marked_pids(container.task_id) == []


def test_two_containers_at_once_have_their_own_marks_and_not_that_of_who_forked_them(
    platform: LoopbackModal, executor: ModalExecutor, spec: JobSpec
) -> None:
    jobs = [executor.submit(replace(spec, command=SLEEP, attempt=attempt)) for attempt in (1, 2)]
    for job in jobs:
        assert next(executor.logs(job, follow=True)) == "up"
    families = [set(platform.pids(job)) for job in jobs]
    assert all(families) and not families[0] & families[1] and not families[0] & set(marked_pids(BLANK))
    executor.cancel(jobs[0])
    assert (platform.pids(jobs[0]), set(platform.pids(jobs[1]))) == ([], families[1])
    for pid in families[1]:
        assert Path(f"/proc/{pid}/environ").read_bytes().count(f"{MARK}=".encode()) == 1
    executor.cancel(jobs[1])


def test_nothing_is_left_of_containers_whose_tests_were_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CALLER, tmp_path], cwd=REPOSITORY, stdout=subprocess.PIPE) as caller:
        assert caller.stdout
        task_id = caller.stdout.readline().decode().strip()
        assert len(marked_pids(task_id)) == 2
        caller.kill()
    wait_until(lambda: marked_pids(task_id) == [])
