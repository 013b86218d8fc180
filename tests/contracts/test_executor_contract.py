"""What every platform promises of its jobs: states, exit codes, ends, finding them again, and secrets.

Run against each loopback of tests/executors/registry.py through the vendor's own client. Logs, racing submitters and
platforms in trouble have files of their own beside this one.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import composer_prime
from composer_prime.errors import BadInput, JobUnknown
from composer_prime.executors.base import Executor, Job, JobSpec, JobState
from tests.executors import fixtures
from tests.executors.jobs import FOREVER, Stage, await_end, await_running, fresh_process, run_to_end, wait_until
from tests.executors.platforms import LoopbackPlatform
from tests.patience import PATIENCE_S

platform, executor, stage = fixtures.platform, fixtures.executor, fixtures.stage
taking, replacing = fixtures.taking, fixtures.replacing

ODD = "a b\tc 'd' \"e\" $HOME `f` \\ * é 漢 🙂 --x=1;#%{}\n second line"
SECRET = "s3cr3t-Wert/+=$'\"-0123456789"
TELL = "import json; mark('got', json.dumps({name: os.environ[name] for name in sys.argv[2:]}))"
"""A job that tells the values of the variables that its arguments name."""


# --- states and exit codes -------------------------------------------------------------------------------------------


def test_a_job_that_ends_with_zero_has_succeeded(executor: Executor, stage: Stage) -> None:
    _, status = run_to_end(executor, stage.spec("pass"))
    assert (status.state, status.exit_code) == (JobState.SUCCEEDED, 0)


@pytest.mark.parametrize("code", [1, 2, 77, 255])
def test_another_exit_code_is_a_failure_and_comes_through(executor: Executor, stage: Stage, code: int) -> None:
    _, status = run_to_end(executor, stage.spec(f"sys.exit({code})"))
    assert (status.state, status.exit_code) == (JobState.FAILED, code)


def test_an_end_by_a_signal_that_nobody_here_sent_is_a_failure(executor: Executor, stage: Stage) -> None:
    _, status = run_to_end(executor, stage.spec("os.kill(os.getpid(), signal.SIGSEGV)"))
    assert status.state is JobState.FAILED
    assert status.exit_code in (-signal.SIGSEGV, None)


def test_a_program_that_is_not_there_is_refused_or_fails(executor: Executor, stage: Stage) -> None:
    spec = JobSpec(stage.run, "a", 1, ("/nowhere/no-such-program",), timeout_s=60, image="any")
    try:
        _, status = run_to_end(executor, spec)
    except BadInput as refused:
        assert "no-such-program" in str(refused)
    else:
        assert status.state is JobState.FAILED and status.exit_code != 0


def test_states_never_go_back_and_the_last_one_stays(executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec("mark('up'); wait('go')"))
    seen = [await_running(executor, job).state]
    stage.await_mark("up")
    stage.mark("go")
    seen += [await_end(executor, job).state, executor.poll(job).state]
    assert seen == [JobState.RUNNING, JobState.SUCCEEDED, JobState.SUCCEEDED]


def test_times_are_unix_seconds_in_order(executor: Executor, stage: Stage) -> None:
    before = time.time()
    _, status = run_to_end(executor, stage.spec("pass"))
    assert status.started_at is not None and status.ended_at is not None
    assert before - 5 <= status.started_at <= status.ended_at <= time.time() + 5


def test_a_running_job_has_a_start_and_no_end(executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec("wait('go')"))
    status = await_running(executor, job)
    assert status.started_at is not None and status.ended_at is None and status.exit_code is None
    stage.mark("go")
    await_end(executor, job)


def test_several_sites_run_at_the_same_time(executor: Executor, stage: Stage) -> None:
    code = "mark(sys.argv[2]); [wait(name) for name in ('r0', 'r1', 'r2')]"
    jobs = [executor.submit(stage.spec(code, site, arguments=(site,))) for site in ("r0", "r1", "r2")]
    assert [await_end(executor, job).state for job in jobs] == [JobState.SUCCEEDED] * 3


# --- what a job is given ---------------------------------------------------------------------------------------------


def test_environment_variables_arrive_as_they_are(executor: Executor, stage: Stage) -> None:
    given = {"PLAIN": "plain", "EMPTY": "", "ODD": ODD}
    _, status = run_to_end(executor, stage.spec(TELL, env=given, arguments=tuple(given)))
    assert status.state is JobState.SUCCEEDED
    assert json.loads(stage.await_mark("got")) == given


def test_a_job_runs_the_code_that_is_tested_and_no_other_checkouts(executor: Executor, stage: Stage) -> None:
    run_to_end(executor, stage.spec("import composer_prime; mark('got', composer_prime.__file__)"))
    assert Path(stage.await_mark("got")).samefile(composer_prime.__file__)


def test_arguments_arrive_as_they_are_and_no_shell_reads_them(executor: Executor, stage: Stage) -> None:
    arguments = (ODD, "", "$(touch pwned)", "a;b", "-", "--")
    run_to_end(executor, stage.spec("import json; mark('got', json.dumps(sys.argv[2:]))", arguments=arguments))
    assert tuple(json.loads(stage.await_mark("got"))) == arguments


def test_secrets_are_seen_by_the_job_as_environment_variables(executor: Executor, stage: Stage) -> None:
    given = {"TOKEN": SECRET, "LINES": "two\nlines-of-it-0123456789\n"}
    run_to_end(executor, stage.spec(TELL, secrets=given, arguments=tuple(given)))
    assert json.loads(stage.await_mark("got")) == given


def test_a_cache_outlives_the_job_where_the_platform_can_keep_it(
    platform: LoopbackPlatform, executor: Executor, stage: Stage
) -> None:
    if not getattr(platform, "keeps_caches", False):
        pytest.skip(f"the loopback of {platform.name} keeps no folders")
    caches = {"weights": str(stage.folder / "cache")}
    code = "p = pathlib.Path(sys.argv[2]) / 'w'; mark('found', str(p.exists())); p.write_text('w')"
    for attempt, found in ((1, "False"), (2, "True")):
        run_to_end(executor, stage.spec(code, attempt=attempt, caches=caches, arguments=(caches["weights"],)))
        assert stage.await_mark("found") == found


CACHED = ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")


def test_the_caches_of_weights_and_compiles_are_where_libraries_look(
    executor: Executor, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CACHED:
        monkeypatch.delenv(name, raising=False)
    weights, compiles = (str(stage.folder / name) for name in ("cache-w", "cache-c"))
    caches = {"weights": weights, "compiles": compiles, "other": str(stage.folder / "cache-o")}
    spec = stage.spec(TELL, caches=caches, arguments=CACHED)
    assert f"HF_HOME={weights}" in executor.describe(spec)
    run_to_end(executor, spec)
    assert json.loads(stage.await_mark("got")) == {
        "HF_HOME": weights,
        "TORCHINDUCTOR_CACHE_DIR": f"{compiles}/torchinductor",
        "TRITON_CACHE_DIR": f"{compiles}/triton",
        "VLLM_CACHE_ROOT": f"{compiles}/vllm",
    }


def test_a_variable_that_a_job_is_given_wins_over_its_caches(executor: Executor, stage: Stage) -> None:
    caches = {"weights": str(stage.folder / "cache-w"), "compiles": str(stage.folder / "cache-c")}
    given = {"HF_HOME": "/given/hf"}
    secret = {"VLLM_CACHE_ROOT": "/given/as-a-secret"}
    names = (*given, *secret)
    run_to_end(executor, stage.spec(TELL, caches=caches, env=given, secrets=secret, arguments=names))
    assert json.loads(stage.await_mark("got")) == {**given, **secret}


# --- idempotence and finding again -----------------------------------------------------------------------------------


def test_a_second_submit_finds_the_running_job(executor: Executor, stage: Stage) -> None:
    spec = stage.spec("count('starts'); mark('up'); wait('go')")
    first = executor.submit(spec)
    stage.await_mark("up")
    assert executor.submit(spec) == first
    stage.mark("go")
    await_end(executor, first)
    assert stage.counted() == 1


def test_a_submit_after_the_end_finds_the_ended_job(executor: Executor, stage: Stage) -> None:
    spec = stage.spec("count('starts')")
    first, _ = run_to_end(executor, spec)
    assert executor.submit(spec) == first
    assert executor.poll(first).state is JobState.SUCCEEDED and stage.counted() == 1


def test_another_attempt_is_another_job(executor: Executor, stage: Stage) -> None:
    jobs = [run_to_end(executor, stage.spec("count('starts')", attempt=attempt))[0] for attempt in (1, 2)]
    assert jobs[0].id != jobs[1].id and [job.attempt for job in jobs] == [1, 2]
    assert stage.counted() == 2


def test_find_lists_a_runs_jobs_by_site_and_attempt_ended_ones_too(executor: Executor, stage: Stage) -> None:
    made = {(s, a): executor.submit(stage.spec("pass", s, a)) for s, a in (("b", 1), ("a", 2), ("a", 1))}
    for job in made.values():
        await_end(executor, job)
    assert executor.find(stage.run) == [made[place] for place in (("a", 1), ("a", 2), ("b", 1))]


def test_find_of_a_run_that_nobody_started_is_empty(executor: Executor) -> None:
    assert executor.find("nobody-started-this") == []


def test_runs_of_like_names_do_not_mix(executor: Executor, stage: Stage) -> None:
    runs = [stage.run, f"{stage.run}--x", f"{stage.run}-x", f"{stage.run}.x"]
    jobs = {run: run_to_end(executor, stage.spec("pass", run=run))[0] for run in runs}
    assert len({job.id for job in jobs.values()}) == len(runs)
    assert {run: executor.find(run) for run in runs} == {run: [job] for run, job in jobs.items()}


def test_another_client_sees_the_same_job(platform: LoopbackPlatform, executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec("print('said'); sys.exit(3)"))
    with closing(platform.executor()) as other:
        assert other.find(stage.run) == [job]
        assert await_end(other, job).exit_code == 3
        assert list(other.logs(job)) == ["said"]


def test_a_fresh_process_finds_reads_and_cancels_a_job(
    platform: LoopbackPlatform, executor: Executor, stage: Stage
) -> None:
    job = executor.submit(stage.spec(f"say('hello'); mark('up'); {FOREVER}"))
    stage.await_mark("up")
    code = """
job, = executor.find(sys.argv[2])
print(executor.poll(job).state)
print(next(iter(executor.logs(job, follow=True))))
print(executor.cancel(job).state)
executor.close()
"""
    with fresh_process(platform.launch_option(), platform.environment(), code, stage.run) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (out.split(), process.returncode) == (["running", "hello", "cancelled"], 0), err
    assert executor.poll(job).state is JobState.CANCELLED and platform.pids(job) == []


def test_a_job_that_the_platform_does_not_have_is_unknown(executor: Executor, stage: Stage) -> None:
    ended, _ = run_to_end(executor, stage.spec("pass"))
    gone = Job(ended.platform, ended.id[::-1], ended.run, ended.site, 77)
    for act in (executor.poll, executor.cancel, lambda job: list(executor.logs(job))):
        with pytest.raises(JobUnknown):
            act(gone)


def test_an_id_that_is_another_jobs_is_unknown_and_that_job_goes_on(executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec("say('not yours'); mark('up'); wait('go')"))
    stage.await_mark("up")

    for forged in (replace(job, site="b"), replace(job, attempt=2), replace(job, run=f"{job.run}-b")):
        for act in (executor.poll, executor.cancel, lambda each: list(executor.logs(each, follow=True))):
            with pytest.raises(JobUnknown):
                act(forged)
    assert executor.poll(job).state is JobState.RUNNING
    stage.mark("go")
    assert await_end(executor, job).state is JobState.SUCCEEDED


# --- ends that come from outside -------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [False, True], ids=["same session", "own session"])
def test_cancel_ends_a_command_that_does_not_listen_and_its_children(
    platform: LoopbackPlatform, executor: Executor, stage: Stage, session: bool
) -> None:
    child = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session={session})"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    job = executor.submit(stage.spec(f"{deaf}; child = {child}; mark('child', str(child.pid)); {FOREVER}"))
    stage.await_mark("child")
    wait_until(lambda: len(platform.pids(job)) >= 2, "two processes")
    assert executor.cancel(job).state is JobState.CANCELLED
    assert platform.pids(job) == [] and executor.poll(job).state is JobState.CANCELLED


def test_cancel_of_an_ended_job_leaves_it_as_it_is(executor: Executor, stage: Stage) -> None:
    job, ended = run_to_end(executor, stage.spec("sys.exit(4)"))
    assert executor.cancel(job) == ended == executor.poll(job)


def test_two_who_cancel_at_once_both_get_their_confirmation(executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec(FOREVER))
    await_running(executor, job)
    with ThreadPoolExecutor(2) as pool:
        assert [status.state for status in pool.map(executor.cancel, [job, job])] == [JobState.CANCELLED] * 2


def test_a_cancelled_job_stays_cancelled_for_its_next_submit(executor: Executor, stage: Stage) -> None:
    spec = stage.spec(f"count('starts'); mark('up'); {FOREVER}")
    job = executor.submit(spec)
    stage.await_mark("up")
    executor.cancel(job)
    assert executor.submit(spec) == job and executor.poll(job).state is JobState.CANCELLED
    assert stage.counted() == 1


def test_the_other_sites_jobs_survive_a_cancel(executor: Executor, stage: Stage) -> None:
    gone, stays = (executor.submit(stage.spec("wait('go')", site)) for site in ("a", "ab"))
    await_running(executor, gone)
    await_running(executor, stays)
    executor.cancel(gone)
    assert executor.poll(stays).state is JobState.RUNNING
    stage.mark("go")
    assert await_end(executor, stays).state is JobState.SUCCEEDED


def test_a_machine_taken_back_is_seen_as_preemption(taking: LoopbackPlatform, executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec(f"mark('up'); {FOREVER}"))
    stage.await_mark("up")
    taking.preempt(job)
    assert await_end(executor, job).state is JobState.PREEMPTED
    wait_until(lambda: taking.pids(job) == [], "no process left")


def test_a_job_whose_machine_is_replaced_goes_on_as_the_same_job(
    replacing: LoopbackPlatform, executor: Executor, stage: Stage
) -> None:
    spec = stage.spec("count('starts'); mark('up'); wait('go')")
    job = executor.submit(spec)
    stage.await_mark("up")
    before = replacing.pids(job)
    with replacing.hold_pending():
        replacing.preempt(job)
        assert executor.poll(job).state is JobState.PENDING and executor.submit(spec) == job
    wait_until(lambda: stage.counted() == 2, "started again")
    assert await_running(executor, job).ended_at is None and not set(before) & set(replacing.pids(job))
    stage.mark("go")
    assert await_end(executor, job).state is JobState.SUCCEEDED and executor.find(stage.run) == [job]
    wait_until(lambda: replacing.pids(job) == [], "no process left")


def test_a_job_is_cancelled_while_its_machine_is_replaced(
    replacing: LoopbackPlatform, executor: Executor, stage: Stage
) -> None:
    job = executor.submit(stage.spec(f"count('starts'); mark('up'); {FOREVER}"))
    stage.await_mark("up")
    with replacing.hold_pending():
        replacing.preempt(job)
        assert executor.cancel(job).state is JobState.CANCELLED
    assert executor.poll(job).state is JobState.CANCELLED and stage.counted() == 1 and replacing.pids(job) == []


def test_a_job_past_its_time_is_ended_and_says_so(platform: LoopbackPlatform, executor: Executor, stage: Stage) -> None:
    job, status = run_to_end(executor, stage.spec(f"say('before'); {FOREVER}", timeout_s=6))
    assert status.state is JobState.TIMED_OUT
    wait_until(lambda: platform.pids(job) == [], "no process left")
    assert list(executor.logs(job)) == ["before"]


# --- secrets and money -----------------------------------------------------------------------------------------------


def test_secrets_are_in_no_text_of_ours(executor: Executor, stage: Stage) -> None:
    spec = stage.spec("sys.exit(os.environ['TOKEN'])", secrets={"TOKEN": SECRET})
    job, status = run_to_end(executor, spec)
    texts = [repr(spec), str(spec), repr(spec.secrets), executor.describe(spec), repr(job), repr(status)]
    assert all(SECRET not in text for text in texts)
    assert "TOKEN" in executor.describe(spec)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_secrets_are_in_no_command_line(platform: LoopbackPlatform, executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec("mark('up'); wait('go')", secrets={"TOKEN": SECRET}))
    stage.await_mark("up")
    lines = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines[int(path.parent.name)] = path.read_bytes()
        except OSError:
            continue
    assert set(platform.pids(job)) & lines.keys()
    assert all(SECRET.encode() not in line for pid, line in lines.items() if pid != os.getpid())
    stage.mark("go")
    await_end(executor, job)


def test_a_description_names_what_runs_and_how_long(executor: Executor, stage: Stage) -> None:
    described = executor.describe(stage.spec("pass", timeout_s=4321, env={"SHOWN": "so"}))
    assert "4321" in described and "SHOWN" in described and sys.executable in described


def test_a_price_says_where_it_is_from(executor: Executor, stage: Stage) -> None:
    price = executor.price(stage.spec("pass"))
    assert price.source and (price.usd_per_hour is None or price.usd_per_hour >= 0)


@pytest.mark.parametrize(("run", "site"), [("run/../x", "a"), ("run", "a b")], ids=["run", "site"])
def test_names_that_no_job_can_have_are_refused_before_it_starts(executor: Executor, run: str, site: str) -> None:
    with pytest.raises(BadInput):
        executor.check(JobSpec(run, site, 1, ("true",), 60))
