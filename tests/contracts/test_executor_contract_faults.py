"""What every platform promises when things go wrong: submitters that race or are killed, requests that fail, a queue.

A job counts its starts in a file, so that a double is seen whatever the platform says.
"""

import json
import random
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import quote

import pytest

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import Executor, JobState
from tests.executors import fixtures
from tests.executors.jobs import PREAMBLE, Stage, await_end, await_running, fresh_process, run_to_end, wait_until
from tests.executors.platforms import LoopbackPlatform, Trouble
from tests.patience import PATIENCE_S

platform, executor, stage = fixtures.platform, fixtures.executor, fixtures.stage

TROUBLES: list[Trouble] = ["429", "503", "reset", "slow"]
STARTS = "count('starts'); mark('up'); wait('go')"
SUBMIT = """
run, folder, program = sys.argv[2:5]
secrets = Secrets({"TOKEN": "t0ken-012345"})
spec = JobSpec(run, "a", 1, (sys.executable, "-c", program, folder), 600, image="any", secrets=secrets)
print("ready", flush=True)
sys.stdin.readline()
job = executor.submit(spec)
print(job.id, flush=True)
sys.stdin.readline()
executor.close()
"""


def open_jobs(executor: Executor, run: str) -> list[JobState]:
    """States of a run's jobs that weren't cancelled as somebody's double."""
    states = [executor.poll(job).state for job in executor.find(run)]
    return [state for state in states if state is not JobState.CANCELLED]


def test_of_racing_processes_all_get_the_same_job(platform: LoopbackPlatform, executor: Executor, stage: Stage) -> None:
    arguments = (stage.run, str(stage.folder), PREAMBLE + STARTS)
    with ExitStack() as stack:
        racers = [
            stack.enter_context(fresh_process(platform.launch_option(), platform.environment(), SUBMIT, *arguments))
            for _ in range(3)
        ]
        for racer in racers:
            assert racer.stdout is not None and racer.stdout.readline() == "ready\n", racer.communicate()[1]
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        ids = {racer.stdout.readline().strip() for racer in racers if racer.stdout is not None}
        assert len(ids) == 1
        for racer in racers:
            racer.communicate("end\n", timeout=PATIENCE_S)
    assert open_jobs(executor, stage.run) in ([JobState.RUNNING], [JobState.PENDING])
    stage.mark("go")
    (job,) = (job for job in executor.find(stage.run) if job.id in ids)
    assert await_end(executor, job).state is JobState.SUCCEEDED


def test_a_job_outlives_the_launcher_that_is_killed(
    platform: LoopbackPlatform, executor: Executor, stage: Stage
) -> None:
    arguments = (stage.run, str(stage.folder), PREAMBLE + STARTS)
    with fresh_process(platform.launch_option(), platform.environment(), SUBMIT, *arguments) as launcher:
        assert launcher.stdin is not None and launcher.stdout is not None
        launcher.stdin.write("go\n")
        launcher.stdin.flush()
        assert launcher.stdout.readline() == "ready\n"
        identity = launcher.stdout.readline().strip()
        launcher.send_signal(signal.SIGKILL)
    (job,) = executor.find(stage.run)
    assert job.id == identity
    await_running(executor, job)
    stage.await_mark("up")
    stage.mark("go")
    assert await_end(executor, job).state is JobState.SUCCEEDED and stage.counted() == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_launcher_killed_while_it_submits_leaves_no_orphan_and_no_double(
    platform: LoopbackPlatform, executor: Executor, stage: Stage, seed: int
) -> None:
    arguments = (stage.run, str(stage.folder), PREAMBLE + STARTS)
    environment = {**platform.environment(), "TMPDIR": str(stage.folder)}  # for what one that is killed leaves
    with fresh_process(platform.launch_option(), environment, SUBMIT, *arguments) as launcher:
        assert launcher.stdin is not None and launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        timer = threading.Timer(random.Random(seed).uniform(0.0, 0.12), launcher.kill)
        timer.start()
        launcher.stdin.write("go\n")
        launcher.stdin.flush()
        launcher.wait(PATIENCE_S)
        timer.join()
    job = executor.submit(stage.spec(STARTS))  # the relaunch
    stage.await_mark("up")
    assert open_jobs(executor, stage.run) == [JobState.RUNNING]
    stage.mark("go")
    assert await_end(executor, job).state is JobState.SUCCEEDED
    wait_until(lambda: not any(platform.pids(each) for each in executor.find(stage.run)), "no process left")
    assert stage.counted() == 1


def test_one_client_serves_several_threads(executor: Executor, stage: Stage) -> None:
    with ThreadPoolExecutor(4) as pool:
        jobs = list(pool.map(lambda n: executor.submit(stage.spec(f"say({n}); sys.exit({n})", f"r{n}")), range(4)))
        assert [status.exit_code for status in pool.map(lambda job: await_end(executor, job), jobs)] == [0, 1, 2, 3]
        assert list(pool.map(lambda job: list(executor.logs(job)), jobs)) == [["0"], ["1"], ["2"], ["3"]]


# --- where there are requests that can fail, and a queue -------------------------------------------------------------


@pytest.fixture
def requesting(platform: LoopbackPlatform) -> LoopbackPlatform:
    if not platform.has_requests:
        pytest.skip(f"{platform.name} starts its jobs itself: no request can fail")
    return platform


@pytest.fixture
def queueing(platform: LoopbackPlatform) -> LoopbackPlatform:
    if not platform.has_queue:
        pytest.skip(f"{platform.name} starts its jobs at once: nothing waits")
    return platform


@pytest.mark.parametrize("kind", TROUBLES)
def test_a_submit_in_trouble_starts_one_job(
    requesting: LoopbackPlatform, executor: Executor, stage: Stage, kind: Trouble
) -> None:
    requesting.trouble(kind, 2)
    job, status = run_to_end(executor, stage.spec("count('starts')"))
    requesting.trouble(kind, 0)
    assert status.state is JobState.SUCCEEDED and stage.counted() == 1
    assert executor.find(stage.run) == [job]


@pytest.mark.parametrize("kind", TROUBLES)
def test_a_poll_a_find_and_a_cancel_in_trouble_are_repeated(
    requesting: LoopbackPlatform, executor: Executor, stage: Stage, kind: Trouble
) -> None:
    job = executor.submit(stage.spec("mark('up'); wait('go')"))
    stage.await_mark("up")
    await_running(executor, job)
    requesting.trouble(kind, 2)
    assert executor.poll(job).state is JobState.RUNNING
    requesting.trouble(kind, 2)
    assert executor.find(stage.run) == [job]
    requesting.trouble(kind, 2)
    assert executor.cancel(job).state is JobState.CANCELLED
    requesting.trouble(kind, 0)
    await_end(executor, job)


@pytest.mark.parametrize("kind", TROUBLES)
def test_a_log_whose_requests_are_in_trouble_comes_whole(
    requesting: LoopbackPlatform, executor: Executor, stage: Stage, kind: Trouble
) -> None:
    job = executor.submit(stage.spec("say('one'); mark('up'); wait('go')"))
    stage.await_mark("up")
    await_running(executor, job)
    requesting.trouble(kind, 2)
    stage.mark("go")
    assert list(executor.logs(job, follow=True)) == ["one"]
    requesting.trouble(kind, 0)
    await_end(executor, job)


def test_a_held_job_is_pending_and_then_runs(queueing: LoopbackPlatform, executor: Executor, stage: Stage) -> None:
    with queueing.hold_pending():
        job = executor.submit(stage.spec("count('starts')"))
        status = executor.poll(job)
        assert status.state is JobState.PENDING and status.started_at is None
        assert stage.counted() == 0
    assert await_end(executor, job).state is JobState.SUCCEEDED and stage.counted() == 1


def test_a_job_cancelled_while_pending_never_starts(
    queueing: LoopbackPlatform, executor: Executor, stage: Stage
) -> None:
    with queueing.hold_pending():
        job = executor.submit(stage.spec("count('starts')"))
        assert executor.cancel(job).state is JobState.CANCELLED
    other, _ = run_to_end(executor, stage.spec("pass", "b"))
    assert executor.poll(other).state is JobState.SUCCEEDED
    assert executor.poll(job).state is JobState.CANCELLED and stage.counted() == 0


# --- errors hold no secret -------------------------------------------------------------------------------------------

SECRETS = {"TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz", "KEY": 'a"b\\c/+=d e'}
ASKED = {
    "local": "composer_prime.executors.local.subprocess.run",
    "ssh": "composer_prime.executors.ssh.SshExecutor._call",
    "modal": "composer_prime.executors.modal.deployed_function",
    "hf-jobs": "huggingface_hub.HfApi.run_job",
    "sky": "composer_prime.executors.sky.SkyApi.launch",
}
"""What each executor asks its platform by, when it starts a job."""


@pytest.mark.parametrize("kind", [BadInput, ExecutorError, OSError])
def test_an_error_that_quotes_the_environment_holds_no_secret(
    platform: LoopbackPlatform,
    executor: Executor,
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
) -> None:
    def refuse(*_: object, **__: object) -> None:
        try:
            raise ValueError(f"in {SECRETS}")
        except ValueError as error:
            text = f"refused: env={SECRETS['TOKEN']} {SECRETS['KEY']} {json.dumps(SECRETS)} ?k={quote(SECRETS['KEY'])}"
            raise kind(text) from error

    monkeypatch.setattr(ASKED[platform.name], refuse)
    with pytest.raises(BadInput if kind is BadInput else ExecutorError, match=r"refused: env=\[redacted\]") as raised:
        executor.submit(stage.spec("pass", secrets=SECRETS))
    printed = "".join(traceback.format_exception(raised.value))
    assert not [value for value in SECRETS.values() if value in printed or json.dumps(value)[1:-1] in printed]


def test_a_refusal_before_anything_is_asked_holds_no_secret(executor: Executor, stage: Stage) -> None:
    spec = stage.spec("pass", run=f"run of {SECRETS['TOKEN']}", secrets=SECRETS)
    for asked in (executor.check, executor.submit):
        with pytest.raises(BadInput, match=r"\[redacted\]") as raised:
            asked(spec)
        assert SECRETS["TOKEN"] not in "".join(traceback.format_exception(raised.value))
