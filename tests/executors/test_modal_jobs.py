"""What only Modal can do to a job: a call that nobody recorded, a container that comes twice, an end from elsewhere."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("modal")
from composer_prime.errors import ExecutorError
from composer_prime.executors import modal as modal_jobs
from composer_prime.executors import modal_job_body as job_body
from composer_prime.executors.base import JobSpec, JobState
from composer_prime.executors.modal import ModalExecutor, Records
from composer_prime.executors.modal_job_body import TIMEOUT_GRACE_S
from tests.executors import loopback_modal_fixtures as fixtures
from tests.executors.loopback_modal_fixtures import SLEEP, wait_for
from tests.executors.loopback_modal_servicer import WORKSPACE
from tests.patience import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the loopback finds a container's processes in /proc")
platform, executor, spec = fixtures.platform, fixtures.executor, fixtures.spec


class Killed(BaseException):
    """The caller's process ends here."""


def counting(folder: Path, spec: JobSpec) -> tuple[JobSpec, Path]:
    """The spec with a command that writes down each of its runs, and where."""
    runs = folder / "runs"
    program = f"import os; os.write(os.open({str(runs)!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY), b'x')"
    return replace(spec, command=(sys.executable, "-c", program)), runs


def killed_at(monkeypatch: pytest.MonkeyPatch, executor: ModalExecutor, spec: JobSpec, entry: str) -> None:
    """Submit in a caller that is killed when it would write this entry."""

    def first(self: Records, job: str, name: str, value: Any) -> Any:
        if name == entry:
            raise Killed
        return original(self, job, name, value)

    original = Records.first
    with monkeypatch.context() as patched:
        patched.setattr(Records, "first", first)
        with pytest.raises(Killed):
            executor.submit(spec)


def killed_at_spawn(monkeypatch: pytest.MonkeyPatch, executor: ModalExecutor, spec: JobSpec) -> None:
    """Submit in a caller that is killed with its claim written and nothing started."""

    class Function:
        def spawn(self, argument: Any) -> Any:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(modal_jobs, "deployed_function", lambda *_: Function())
        with pytest.raises(Killed):
            executor.submit(spec)


# Finding what a killed caller left


def test_a_caller_killed_before_its_claim_leaves_no_job(executor, spec, monkeypatch):
    killed_at(monkeypatch, executor, spec, "claim")
    assert executor.find(spec.run) == []


def test_a_claim_without_a_call_is_found_and_finished_by_the_next_caller(platform, executor, spec, monkeypatch):
    killed_at_spawn(monkeypatch, executor, spec)
    fresh = platform.executor()
    (job,) = fresh.find(spec.run)
    assert (job.site, job.attempt, fresh.poll(job).state) == ("a", 1, JobState.PENDING)
    assert fresh.poll(job).half_submitted
    assert fresh.submit(spec) == job
    assert wait_for(fresh, job).state is JobState.SUCCEEDED
    assert len(platform.calls(job)) == 1


def test_a_claim_without_a_call_can_be_cancelled_and_stays_so(platform, executor, spec, monkeypatch):
    killed_at_spawn(monkeypatch, executor, spec)
    (job,) = executor.find(spec.run)
    assert executor.cancel(job).state is JobState.CANCELLED
    assert executor.submit(spec) == job
    assert executor.poll(job).state is JobState.CANCELLED
    assert platform.calls(job) == []


def test_a_call_that_was_never_recorded_records_itself(executor, spec, monkeypatch, tmp_path):
    spec, runs = counting(tmp_path, spec)
    killed_at(monkeypatch, executor, spec, "call")
    (job,) = executor.find(spec.run)
    assert wait_for(executor, job).state is JobState.SUCCEEDED
    assert runs.read_text() == "x"


def test_a_second_call_for_a_job_whose_first_was_not_recorded_does_not_double_it(
    platform, executor, spec, monkeypatch, tmp_path
):
    spec, runs = counting(tmp_path, spec)
    with platform.hold_pending():
        killed_at(monkeypatch, executor, spec, "call")
        job = executor.submit(spec)
        assert len(platform.calls(job)) == 2
    assert wait_for(executor, job).state is JobState.SUCCEEDED
    wait_until(lambda: all(call.output for call in platform.calls(job)))
    assert runs.read_text() == "x"


def test_a_call_that_was_never_recorded_does_not_start_after_a_cancel(platform, executor, spec, monkeypatch, tmp_path):
    spec, runs = counting(tmp_path, spec)
    with platform.hold_pending():
        killed_at(monkeypatch, executor, spec, "call")
        (job,) = executor.find(spec.run)
        assert executor.cancel(job).state is JobState.CANCELLED
    wait_until(lambda: all(call.output for call in platform.calls(job)))
    assert not runs.exists()
    assert executor.poll(job).state is JobState.CANCELLED


def test_an_entry_whose_answer_was_lost_is_still_ours(platform, executor, spec):
    job = executor.submit(spec)
    records = Records(executor._connection, spec.run)
    platform.servicer.lose_answer("DictUpdate")
    assert records.first(job.id, "test", "mine") == "mine"
    assert records.first(job.id, "test", "theirs") == "mine"


# How a job ends


def test_a_preempted_job_gets_its_warning_and_is_not_started_again(platform, executor, spec):
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    job = executor.submit(replace(spec, command=(sys.executable, "-c", program)))
    assert next(executor.logs(job, follow=True)) == "up"
    platform.preempt(job)
    status = wait_for(executor, job)
    assert status.state is JobState.PREEMPTED
    assert status.started_at and status.ended_at and status.started_at < status.ended_at
    assert Records(executor._connection, spec.run).get(job.id, "end")["ended_at"] == status.ended_at
    assert list(executor.logs(job)) == ["up", "saved"]
    (call,) = platform.calls(job)
    wait_until(lambda: call.runner and call.runner.done())
    wait_until(lambda: platform.pids(job) == [], "no process left")
    assert executor.poll(job).state is JobState.PREEMPTED


def test_a_job_whose_machine_vanished_is_not_run_by_the_next_container(platform, executor, spec):
    job = executor.submit(replace(spec, command=SLEEP))
    assert next(executor.logs(job, follow=True)) == "up"
    platform.preempt(job, warn=False)
    status = wait_for(executor, job)
    assert status.state is JobState.PREEMPTED
    assert "was taken back" in status.message
    (call,) = platform.calls(job)
    assert len(call.containers) == 2
    assert list(executor.logs(job)) == ["up"]


def test_a_command_past_its_time_is_asked_to_end_first(platform, executor, spec):
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "time.sleep(600)"
    )
    job = executor.submit(replace(spec, command=(sys.executable, "-c", program), timeout_s=3))
    status = wait_for(executor, job)
    assert status.state is JobState.TIMED_OUT
    assert status.started_at and status.ended_at and 3 <= status.ended_at - status.started_at < 3 + TIMEOUT_GRACE_S / 4
    assert list(executor.logs(job)) == ["saved"]
    wait_until(lambda: platform.pids(job) == [], "no process left")


def test_a_container_that_ignores_its_time_is_ended_by_modal(platform, executor, spec):
    with platform.hold_pending():
        job = executor.submit(replace(spec, command=SLEEP, timeout_s=601))
        (call,) = platform.calls(job)
        platform.servicer.functions[call.function_id].definition.timeout_secs = 3
    status = wait_for(executor, job)
    assert status.state is JobState.TIMED_OUT
    assert "timeout of 3s" in status.message
    wait_until(lambda: platform.pids(job) == [], "no process left")


def test_what_a_command_leaves_behind_ends_before_the_container(tmp_path, capsys):
    written = tmp_path / "pid"
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(written)!r}, 'w').write(str(child.pid))\n"
        "print('done')"
    )
    # Not in a container, which would take everything with it.
    answer = job_body._run([sys.executable, "-c", program], {}, 60)
    assert (answer, capsys.readouterr().out) == (
        {"state": "succeeded", "exit_code": 0, "message": "exit code 0"},
        "done\n",
    )
    child = Path(f"/proc/{written.read_text()}/stat")
    # A zombie waits for a parent that isn't ours.
    wait_until(lambda: not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_call_that_was_stopped_elsewhere_is_cancelled(platform, executor, spec):
    job = executor.submit(replace(spec, command=SLEEP))
    wait_for(executor, job, JobState.RUNNING)
    (call,) = platform.calls(job)
    platform._do(platform.servicer.calls.cancel(call))
    assert executor.poll(job).state is JobState.CANCELLED


def test_a_container_that_can_not_start_is_a_failure_that_says_so(platform, executor, spec):
    with platform.hold_pending():
        job = executor.submit(replace(spec, timeout_s=61))
        (call,) = platform.calls(job)
        files = platform.servicer.functions[call.function_id].files
        for name in files:
            files[name] = b"raise RuntimeError('no such interpreter')"
    status = wait_for(executor, job)
    assert status.state is JobState.FAILED
    assert "no such interpreter" in status.message


def test_a_cancel_whose_caller_was_killed_is_finished_by_whoever_looks(executor, spec, monkeypatch):
    def die(*_: Any) -> None:
        raise Killed

    job = executor.submit(replace(spec, command=SLEEP))
    wait_for(executor, job, JobState.RUNNING)
    with monkeypatch.context() as patched:
        patched.setattr(ModalExecutor, "_end", die)
        with pytest.raises(Killed):
            executor.cancel(job)
    status = wait_for(executor, job)
    assert status.state is JobState.CANCELLED and status.ended_at


def test_a_job_that_ended_by_itself_while_it_was_cancelled_keeps_its_end(platform, executor, spec):
    job = executor.submit(spec)
    (call,) = platform.calls(job)
    wait_until(lambda: call.output)
    end = {"state": "cancelled", "message": "cancelled", "ended_at": 1.0}
    assert Records(executor._connection, spec.run).first(job.id, "end", end) == end
    status = executor.poll(job)
    assert (status.state, status.exit_code) == (JobState.SUCCEEDED, 0)


def test_a_cancel_that_modal_does_not_confirm_says_that_it_may_be_billed(platform, executor, spec, monkeypatch):
    job = executor.submit(replace(spec, command=SLEEP))
    wait_for(executor, job, JobState.RUNNING)
    with monkeypatch.context() as patched:

        async def ignore(call: Any) -> None:
            pass

        patched.setattr(platform.servicer.calls, "cancel", ignore)
        patched.setattr(modal_jobs, "CONFIRM_S", 0.0)
        with pytest.raises(
            ExecutorError,
            match=r"0 s after it was cancelled: job .* may still run, and be billed: see https://modal.com/apps",
        ):
            executor.cancel(job)
    assert executor.cancel(job).state is JobState.CANCELLED
    assert platform.pids(job) == []


# --- whose jobs ------------------------------------------------------------------------------------------------------


def test_the_account_is_the_workspace_and_the_environment(platform, executor, monkeypatch):
    assert executor.account() == WORKSPACE
    monkeypatch.setenv("MODAL_ENVIRONMENT", "dev")
    assert platform.executor().account() == f"{WORKSPACE}/dev"
