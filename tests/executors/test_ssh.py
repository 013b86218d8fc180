"""The ssh executor beyond the contract: whose keys it trusts, where jobs go, what a host that is gone means."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors.base import Job, JobSpec, JobState, Resources
from composer_prime.executors.ssh import remote as ssh_remote
from composer_prime.executors.ssh.executor import SshExecutor
from composer_prime.executors.ssh.hosts import by_preference
from composer_prime.executors.ssh.link import Patience
from composer_prime.store import launch_keys, open_store
from tests.cli.command_line import Answer, call
from tests.executors.jobs import FOREVER, Stage, await_end, await_running, run_to_end, wait_until
from tests.executors.loopback_ssh import SshPlatform
from tests.executors.staged import StagedFleet, staged_plan
from tests.patience import PATIENCE_S

HASTY = Patience(pauses_s=(0.05, 0.05), connect_s=5.0, call_s=20.0)
SECRET = "s3cr3t-0123456789-abcdef"


@contextmanager
def machines(folder: Path, *names: str, slots: int = 4, one_home: bool = False) -> Iterator[SshPlatform]:
    with closing(SshPlatform(folder / "machines", names, slots, one_home=one_home)) as platform:
        yield platform


@contextmanager
def hasty(platform: SshPlatform) -> Iterator[SshExecutor]:
    with closing(SshExecutor(platform.hosts_file, grace_s=1.0, patience=HASTY)) as executor:
        yield executor


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Stage:
    return Stage(tmp_path / "stage", request.function.__name__.removeprefix("test_"))


def host_of(job: Job) -> str:
    return job.id.rpartition("@")[2]


# --- whom it trusts, and who is let in -------------------------------------------------------------------------------


def test_a_host_that_shows_another_key_is_refused_before_anything_is_sent(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform, hasty(platform) as executor:
        other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
        (platform.folder / "known_hosts").write_text(f"[127.0.0.1]:{platform.machines['left'].port} {other}")
        with pytest.raises(BadInput, match=r"host left .*not trusted.*known_hosts.*compare|Compare") as refused:
            executor.submit(stage.spec("pass"))
        assert "\n" not in str(refused.value) and platform.machines["left"].commands == []


def test_a_host_that_is_in_no_list_is_refused(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform, hasty(platform) as executor:
        (platform.folder / "known_hosts").write_text("")
        with pytest.raises(BadInput, match="doesn't hold the key that it shows"):
            executor.find(stage.run)
        (platform.folder / "known_hosts").unlink()
        with pytest.raises(BadInput, match=r"known_hosts \(.*\) isn't there: connect once by `ssh -p"):
            executor.find(stage.run)


def test_ssh_configuration_cannot_turn_the_check_off(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform:
        (tmp_path / "config").write_text("Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile none\n")
        (platform.folder / "known_hosts").write_text("")
        platform.set_host("left", ssh_config=str(tmp_path / "config"), known_hosts=str(tmp_path / "none"))
        (tmp_path / "none").write_text("")
        with hasty(platform) as executor, pytest.raises(BadInput, match="doesn't hold the key"):
            executor.find(stage.run)


def test_a_name_of_ssh_configuration_will_do_as_an_address(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform:
        port = platform.machines["left"].port
        (tmp_path / "config").write_text(f"Host box\n  HostName 127.0.0.1\n  Port {port}\n")
        platform.set_host("left", address="box", port=None, ssh_config=str(tmp_path / "config"))
        with hasty(platform) as executor:
            assert executor.find(stage.run) == []


def test_a_key_that_is_not_admitted_is_refused_with_the_remedy(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform:
        asyncssh.generate_private_key("ssh-ed25519").write_private_key(tmp_path / "stranger")
        platform.set_host("left", key=str(tmp_path / "stranger"))
        with hasty(platform) as executor, pytest.raises(BadInput, match=r"refuses .*stranger for user tester: add"):
            executor.find(stage.run)


def test_a_key_that_cannot_be_read_is_named(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform:
        platform.set_host("left", key=str(tmp_path / "nowhere"))
        with hasty(platform) as executor, pytest.raises(BadInput, match=r"key \(.*nowhere\) isn't there"):
            executor.find(stage.run)
        locked = asyncssh.generate_private_key("ssh-ed25519")
        locked.write_private_key(tmp_path / "locked", "pkcs8-pem", passphrase="a phrase")
        platform.set_host("left", key=str(tmp_path / "locked"))
        with hasty(platform) as executor, pytest.raises(BadInput, match=r"key \(.*locked\) can't be read: .*ssh-add"):
            executor.find(stage.run)


def test_a_host_without_python_says_what_to_name(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform:
        platform.set_host("left", python="/nowhere/python3")
        with (
            hasty(platform) as executor,
            pytest.raises(BadInput, match=r"python \(/nowhere/python3\) can't be run there"),
        ):
            executor.find(stage.run)


def test_a_host_behind_another_is_reached_through_it(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "bastion", "inner") as platform:
        bastion, inner = platform.machines["bastion"], platform.machines["inner"]
        platform.set_host("inner", proxy_jump=f"tester@127.0.0.1:{bastion.port}")
        platform.drop_host("bastion")
        with hasty(platform) as executor:
            job, status = run_to_end(executor, stage.spec("print('through')"))
            assert status.state is JobState.SUCCEEDED and list(executor.logs(job)) == ["through"]
        assert set(bastion.forwarded) == {inner.port} and bastion.commands == [] and inner.commands


# --- where jobs go ---------------------------------------------------------------------------------------------------


def test_jobs_beyond_the_slots_wait_and_start_when_one_is_free(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left", slots=1) as platform, hasty(platform) as executor:
        first = executor.submit(stage.spec("mark('first'); wait('go')", "a"))
        stage.await_mark("first")
        second = executor.submit(stage.spec("mark('second')", "b"))
        waiting = executor.poll(second)
        assert waiting.state is JobState.PENDING and "1 slot" in waiting.message and waiting.started_at is None
        stage.mark("go")
        assert await_end(executor, second).state is JobState.SUCCEEDED
        assert executor.poll(first).state is JobState.SUCCEEDED


def test_a_waiting_job_can_be_cancelled_and_never_starts(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left", slots=1) as platform, hasty(platform) as executor:
        first = executor.submit(stage.spec("mark('first'); wait('go')", "a"))
        stage.await_mark("first")
        second = executor.submit(stage.spec("count('starts')", "b"))
        assert executor.cancel(second).state is JobState.CANCELLED
        stage.mark("go")
        await_end(executor, first)
        assert executor.poll(second).state is JobState.CANCELLED and stage.counted() == 0


def test_a_slot_is_free_again_after_a_preemption(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left", slots=1) as platform, hasty(platform) as executor:
        first = executor.submit(stage.spec(f"mark('first'); {FOREVER}", "a"))
        stage.await_mark("first")
        platform.preempt(first)
        assert run_to_end(executor, stage.spec("pass", "a", 2))[1].state is JobState.SUCCEEDED


def test_a_job_whose_machine_has_booted_since_was_preempted_even_if_its_pid_lives(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform, hasty(platform) as executor:
        job = executor.submit(stage.spec(f"mark('up'); {FOREVER}"))
        stage.await_mark("up")
        platform.preempt(job)
        path = platform.folder_of(job) / "state.json"
        state = json.loads(path.read_text())
        boot = "00000000-0000-0000-0000-000000000000"
        path.write_text(json.dumps({**state, "keeper": 1, "keeper_start": f"{boot}:1"}))
        assert executor.poll(job).state is JobState.PREEMPTED


def test_sites_spread_over_hosts_by_their_slots(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left", "right", slots=2) as platform, hasty(platform) as executor:
        with ThreadPoolExecutor(4) as pool:
            jobs = list(pool.map(lambda site: executor.submit(stage.spec("wait('go')", site)), "abcd"))
        assert sorted(map(host_of, jobs)) == ["left", "left", "right", "right"]
        assert all(await_running(executor, job) for job in jobs)
        stage.mark("go")
        assert {await_end(executor, job).state for job in jobs} == {JobState.SUCCEEDED}


def test_hosts_that_share_a_home_have_slots_and_jobs_of_their_own(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left", "right", slots=1, one_home=True) as platform, hasty(platform) as executor:
        jobs = [executor.submit(stage.spec("wait('go')", site)) for site in "ab"]
        assert sorted(map(host_of, jobs)) == ["left", "right"]
        assert [await_running(executor, job).state for job in jobs] == [JobState.RUNNING] * 2
        assert executor.find(stage.run) == jobs
        place, _, host = jobs[0].id.rpartition("@")
        mistaken = replace(jobs[0], id=f"{place}@{'left' if host == 'right' else 'right'}")
        for ask in (executor.poll, executor.cancel, lambda job: list(executor.logs(job))):
            with pytest.raises(BadInput, match=f"is of the host {host}, which shares"):
                ask(mistaken)
        assert executor.submit(stage.spec("wait('go')", "a")) == jobs[0]
        stage.mark("go")
        assert {await_end(executor, job).state for job in jobs} == {JobState.SUCCEEDED}


def test_the_next_attempt_goes_where_the_sites_files_are(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left", "right", "third") as platform, hasty(platform) as executor:
        code = "count('runs'); path = pathlib.Path('checkpoint'); mark(sys.argv[2], str(path.exists())); path.touch()"
        jobs = [
            run_to_end(executor, stage.spec(code, attempt=attempt, arguments=(f"seen{attempt}",)))[0]
            for attempt in range(1, 5)
        ]
        assert len(set(map(host_of, jobs))) == 1
        assert [stage.await_mark(f"seen{attempt}") for attempt in range(1, 5)] == ["False", "True", "True", "True"]


def test_each_slot_has_gpus_of_its_own(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform:
        platform.set_host("left", slots=2, gpus=5, gpu="H100")
        with hasty(platform) as executor:
            code = "mark(sys.argv[2], os.environ['CUDA_VISIBLE_DEVICES']); wait('go')"
            jobs = [executor.submit(stage.spec(code, site, arguments=(site,))) for site in "ab"]
            assert sorted(stage.await_mark(site) for site in "ab") == ["0,1", "2,3"]
            stage.mark("go")
            for job in jobs:
                await_end(executor, job)
            with pytest.raises(BadInput, match="needs 3 GPUs"):
                executor.check(JobSpec("r", "a", 1, ("true",), 60, resources=Resources(gpu="H100", gpu_count=3)))


def test_launchers_that_race_on_several_hosts_start_one_job(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left", "right", "third") as platform:
        spec = stage.spec("count('starts'); wait('go')")
        barrier = threading.Barrier(4)

        def launch(_: int) -> Job:
            with hasty(platform) as executor:
                barrier.wait()
                return executor.submit(spec)

        with ThreadPoolExecutor(4) as pool:
            jobs = set(pool.map(launch, range(4)))
        (job,) = jobs
        stage.mark("go")
        with hasty(platform) as executor:
            await_end(executor, job)
            assert executor.find(stage.run) == [job]
        assert stage.counted() == 1


def test_a_job_goes_where_its_record_says_whatever_host_has_more_room_now(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left", "right") as platform, hasty(platform) as executor:
        spec = stage.spec("pass")
        recorder, other = by_preference(["left", "right"], spec.name)
        root = platform.machines[recorder].home / ".composer-prime"
        here = ssh_remote.Here(str(root), recorder)
        assert ssh_remote.place(here, f"{stage.run}/a/1", other) == other
        assert ssh_remote.place(here, f"{stage.run}/a/1", recorder) == other, "the first counts"
        assert host_of(executor.submit(spec)) == other
        assert host_of(executor.submit(stage.spec("pass", attempt=2))) == other, "the site's files are there"


def test_a_host_is_written_down_before_the_job_starts(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left", "right") as platform, hasty(platform) as executor:
        job = executor.submit(stage.spec("pass"))
        records = [
            path.read_text()
            for machine in platform.machines.values()
            for path in (machine.home / ".composer-prime" / "placed").glob("*/*/*")
        ]
        assert records == [host_of(job)]


@pytest.mark.parametrize("lost", range(6))
def test_a_launcher_killed_between_its_steps_starts_the_job_on_the_same_host(
    tmp_path: Path, stage: Stage, lost: int
) -> None:
    """One call does its work, its answer is lost, and nothing after it is done: for each call of a submit."""
    with machines(tmp_path, "left", "right") as platform:
        spec = stage.spec("count('starts')")
        killed = Patience(pauses_s=(), connect_s=5.0, call_s=20.0)
        with closing(SshExecutor(platform.hosts_file, patience=killed)) as executor:
            platform.lose_answer_after(lost)
            try:
                executor.submit(spec)
            except ExecutorError:
                assert platform.troubles.taken == 1
        platform.lose_answer_after(None)
        with hasty(platform) as executor:
            job = executor.submit(spec)
            await_end(executor, job)
            assert executor.find(stage.run) == [job] and executor.submit(spec) == job
        assert stage.counted() == 1


# --- a host that is gone ---------------------------------------------------------------------------------------------


def test_find_names_the_host_that_does_not_answer_rather_than_leave_it_out(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left", "right") as platform, hasty(platform) as executor:
        jobs = [executor.submit(stage.spec(FOREVER, site)) for site in "ab"]
        gone = host_of(jobs[0])
        platform.stop(gone)
        with pytest.raises(ExecutorError, match=rf"host {gone} \(127.0.0.1\) doesn't answer.* may still run there"):
            executor.find(stage.run)
        platform.start(gone)
        assert executor.find(stage.run) == jobs
        assert {executor.cancel(job).state for job in jobs} == {JobState.CANCELLED}


def test_a_job_on_a_host_that_is_gone_may_still_run_and_cancel_says_so(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform, hasty(platform) as executor:
        job = executor.submit(stage.spec(f"mark('up'); {FOREVER}"))
        stage.await_mark("up")
        platform.stop("left")
        for act in (executor.poll, executor.cancel):
            with pytest.raises(ExecutorError, match=r"host left .* doesn't answer") as failed:
                act(job)
        assert f"job {job.id} may still run there" in str(failed.value)
        platform.start("left")
        assert executor.cancel(job).state is JobState.CANCELLED


def test_new_jobs_go_to_the_hosts_that_answer(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left", "right") as platform, hasty(platform) as executor:
        platform.stop("left")
        outcomes = []
        for number in range(8):
            try:
                outcomes.append(host_of(run_to_end(executor, stage.spec("pass", f"s{number}"))[0]))
            except ExecutorError as error:
                assert "host left" in str(error) and "has the record" in str(error)
                outcomes.append("refused")
        assert set(outcomes) == {"right", "refused"}, "each host has the records of some jobs"


def test_a_follower_goes_on_where_it_was_when_the_connection_is_lost(tmp_path: Path, stage: Stage) -> None:
    code = """
for n in range(300):
    if n % 100 == 50:
        sys.stdout.write("half ")
        sys.stdout.flush()
        mark(f"at{n}")
        wait(f"go{n}")
    say(f"line {n}")
"""
    with machines(tmp_path, "left") as platform, hasty(platform) as executor:
        job = executor.submit(stage.spec(code))
        lines, read = executor.logs(job, follow=True), []
        for stop in (50, 150, 250):
            stage.await_mark(f"at{stop}")
            while len(read) < stop:
                read.append(next(lines))
            platform.cut("left")
            stage.mark(f"go{stop}")
        read += lines
        assert read == [f"{'half ' if n % 100 == 50 else ''}line {n}" for n in range(300)]


def test_a_quiet_log_outlasts_more_lost_connections_than_one_call_would(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform:
        impatient = Patience(pauses_s=(0.05, 0.05), lasted_s=0.0)
        with closing(SshExecutor(platform.hosts_file, grace_s=1.0, patience=impatient)) as executor:
            job = executor.submit(stage.spec("say('one'); wait('go'); say('two')"))
            lines = executor.logs(job, follow=True)
            assert next(lines) == "one"
            with ThreadPoolExecutor(1) as pool:
                rest = pool.submit(list, lines)
                left = platform.machines["left"]
                for _ in range(6):
                    before = left.num_answers
                    platform.cut("left")
                    wait_until(lambda before=before: left.num_answers > before, "the follower reads again")
                stage.mark("go")
                assert rest.result(timeout=PATIENCE_S) == ["two"]


def test_a_job_on_a_host_that_the_file_does_not_name_gives_no_answer_and_is_not_unknown(
    tmp_path: Path, stage: Stage
) -> None:
    with machines(tmp_path, "left") as platform, hasty(platform) as executor:
        with pytest.raises(ExecutorError, match=r"host elsewhere, which .*hosts.toml doesn't name: add .*--on") as seen:
            executor.poll(Job("ssh", "run/a/1@elsewhere", "run", "a", 1))
        assert not isinstance(seen.value, JobUnknown)
        with pytest.raises(JobUnknown, match="is no id of"):
            executor.poll(Job("ssh", "run/../../etc/1@left", "run", "a", 1))
        with pytest.raises(BadInput, match="site"):
            executor.poll(Job("ssh", "run/../1@left", "run", "..", 1))


# --- from another folder, or another machine -------------------------------------------------------------------------


def test_jobs_are_found_from_another_folder_and_by_a_hosts_file_at_another_path(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with machines(tmp_path, "left") as platform:
        monkeypatch.chdir(platform.folder)
        plan = staged_plan("ssh:hosts.toml", "a")
        assert plan.on == f"ssh:{platform.hosts_file}"
        with closing(StagedFleet(stage.folder, f"say('up'); {FOREVER}")) as fleet:
            fleet.start(plan, "a", 1, 600)
            uri = fleet.book.store.uri
        monkeypatch.chdir(tmp_path)
        moved = platform.hosts_file.rename(tmp_path / "moved.toml")
        with closing(open_store(uri)) as store:
            store.delete(launch_keys.hosts(1, 1))  # as launches of earlier releases are

        def cli(*arguments: str) -> Answer:
            return call(capsys, monkeypatch, *arguments)

        (row,) = map(json.loads, cli("ps", uri, "--json").out.splitlines())
        assert row["state"] == "unknown" and f"{platform.hosts_file} can't be read" in row["message"]
        (row,) = map(json.loads, cli("ps", uri, "--json", "--on", "ssh:moved.toml").out.splitlines())
        assert row["state"] in ("pending", "running")
        assert cli("cancel", uri, "--on", f"ssh:{moved}").code == 0
        assert cli("logs", uri, "--on", "ssh:moved.toml").code == 0


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_secrets_are_in_no_command_and_in_no_file_of_the_host(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform, hasty(platform) as executor:
        spec = stage.spec("print(os.environ['TOKEN']); mark('up'); wait('go')", secrets={"TOKEN": SECRET})
        job = executor.submit(spec)
        stage.await_mark("up")
        left = platform.machines["left"]
        files = [path for path in left.home.rglob("*") if path.is_file()]
        assert left.commands and len(files) > 3
        assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
        assert not any(SECRET in command for command in left.commands)
        assert (left.home / ".composer-prime").stat().st_mode & 0o077 == 0
        stage.mark("go")
        await_end(executor, job)


def test_a_closed_executor_says_so(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left") as platform:
        executor = platform.executor()
        executor.close()
        executor.close()
        with pytest.raises(ExecutorError, match="closed"):
            executor.find(stage.run)
