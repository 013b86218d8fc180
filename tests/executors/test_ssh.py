"""The ssh executor beyond the contract: whose keys it trusts, where jobs go, what a host that is gone means."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors import services
from composer_prime.executors.base import Job, JobState
from composer_prime.executors.ssh import SshExecutor
from tests.executors.jobs import FOREVER, Stage, await_end, run_to_end
from tests.executors.loopback_ssh import SshPlatform

SECRET = "s3cr3t-0123456789-abcdef"


@contextmanager
def machines(folder: Path, *names: str) -> Iterator[SshPlatform]:
    with closing(SshPlatform(folder / "machines", names or ("left",))) as platform:
        yield platform


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "PAUSES_S", (0.05, 0.05))


@contextmanager
def hasty(platform: SshPlatform, host: str = "") -> Iterator[SshExecutor]:
    with closing(SshExecutor(host or platform.host(), grace_s=1.0)) as executor:
        yield executor


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Stage:
    return Stage(tmp_path / "stage", request.function.__name__.removeprefix("test_"))


# --- whom it trusts, and who is let in -------------------------------------------------------------------------------


def test_a_host_that_shows_another_key_is_refused_before_anything_is_sent(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "left", "right") as platform, hasty(platform) as executor:
        platform.trust(replace(platform.machines["right"], port=platform.machine.port))
        with pytest.raises(BadInput, match=r"not trusted.*known_hosts doesn't hold the key.*Compare the") as refused:
            executor.submit(stage.spec("pass"))
        assert "\n" not in str(refused.value) and platform.machine.commands == []


def test_a_host_that_is_in_no_list_is_refused(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path) as platform, hasty(platform) as executor:
        platform.trust()
        with pytest.raises(BadInput, match="doesn't hold the key that it shows"):
            executor.find(stage.run)
        (platform.ssh / "known_hosts").unlink()
        with pytest.raises(BadInput, match=r"doesn't hold the key .* by `ssh -p"):
            executor.find(stage.run)


def test_ssh_configuration_cannot_turn_the_check_off(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path) as platform, hasty(platform) as executor:
        (platform.ssh / "config").write_text("Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile none\n")
        platform.trust()
        with pytest.raises(BadInput, match="doesn't hold the key"):
            executor.find(stage.run)


def test_a_name_of_ssh_configuration_will_do(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path) as platform:
        key = (platform.ssh / "id_ed25519").rename(platform.ssh / "another")
        (platform.ssh / "config").write_text(
            f"Host box\n  HostName 127.0.0.1\n  Port {platform.machine.port}\n  User tester\n  IdentityFile {key}\n"
        )
        with hasty(platform, "box") as executor:
            assert executor.find(stage.run) == []


def test_a_host_behind_another_is_reached_through_it(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path, "inner", "bastion") as platform:
        bastion, inner = platform.machines["bastion"], platform.machine
        (platform.ssh / "config").write_text(
            f"Host inner\n  HostName 127.0.0.1\n  Port {inner.port}\n  ProxyJump tester@127.0.0.1:{bastion.port}\n"
        )
        with hasty(platform, "tester@inner") as executor:
            job, status = run_to_end(executor, stage.spec("print('through')"))
            assert status.state is JobState.SUCCEEDED and list(executor.logs(job)) == ["through"]
        assert set(bastion.forwarded) == {inner.port} and bastion.commands == [] and inner.commands


def test_a_key_that_is_not_admitted_is_refused_with_the_remedy(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path) as platform, hasty(platform) as executor:
        asyncssh.generate_private_key("ssh-ed25519").write_private_key(platform.ssh / "id_ed25519")
        with pytest.raises(BadInput, match=r"refuses .* keys .* for user tester: add a public key"):
            executor.find(stage.run)


def test_a_host_without_python_says_what_to_install(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path) as platform, hasty(platform) as executor:
        platform.machine.variables["PATH"] = "/nowhere"
        with pytest.raises(BadInput, match=r"python3 can't be run there: .*Install Python 3.9 or newer"):
            executor.find(stage.run)


@pytest.mark.parametrize(
    "host", ["", "-oProxyCommand=evil", "a b", "$(evil)", "a;b", "bob@", "box:0", "box:99999", "../x", "a/b", "x" * 300]
)
def test_what_is_no_host_reaches_no_ssh_configuration(host: str) -> None:
    with pytest.raises(BadInput, match=r"must be ssh:\[user@\]address\[:port\]"):
        SshExecutor(host)


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_an_environment_in_the_folder_there_has_the_programs_of_jobs(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path) as platform, hasty(platform) as executor:
        programs = platform.machine.home / ".composer-prime" / "venv" / "bin"
        programs.mkdir(parents=True)
        (programs / "its-own").write_text("#!/bin/sh\necho found\n")
        (programs / "its-own").chmod(0o755)
        job, status = run_to_end(executor, replace(stage.spec("pass"), command=("its-own",)))
        assert status.state is JobState.SUCCEEDED and list(executor.logs(job)) == ["found"]


def test_a_job_whose_machine_has_booted_since_was_preempted_even_if_its_pid_lives(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path) as platform, hasty(platform) as executor:
        job = executor.submit(stage.spec(f"mark('up'); {FOREVER}"))
        stage.await_mark("up")
        platform.preempt(job)
        path = platform.folder_of(job) / "state.json"
        state = json.loads(path.read_text())
        boot = "00000000-0000-0000-0000-000000000000"
        path.write_text(json.dumps({**state, "keeper": 1, "keeper_start": f"{boot}:1"}))
        assert executor.poll(job).state is JobState.PREEMPTED


def test_a_job_of_another_machine_that_shares_the_folder_is_left_to_that(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path) as platform, hasty(platform) as executor:
        job, _ = run_to_end(executor, stage.spec("pass"))
        path = platform.folder_of(job) / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": "another", "state": "running"}))
        assert executor.find(stage.run) == []
        for act in (executor.poll, executor.cancel):
            with pytest.raises(BadInput, match=r"was started on another, which shares .*: ask that host"):
                act(job)


def test_a_job_on_a_host_that_is_gone_may_still_run_and_cancel_says_so(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path) as platform, hasty(platform) as executor:
        job = executor.submit(stage.spec(f"mark('up'); {FOREVER}"))
        stage.await_mark("up")
        platform.stop()
        for act in (executor.poll, executor.cancel, lambda job: executor.find(job.run)):
            with pytest.raises(ExecutorError, match=r"host tester@127.0.0.1:\d+ doesn't answer") as failed:
                act(job)
            if act == executor.cancel:
                assert f"job {job.id} may still run there" in str(failed.value)
        platform.start()
        assert executor.find(stage.run) == [job]
        assert executor.cancel(job).state is JobState.CANCELLED


def test_an_id_that_is_another_jobs_or_another_hosts_is_unknown(tmp_path: Path) -> None:
    with machines(tmp_path) as platform, hasty(platform) as executor:
        for id in ("run/a/1@elsewhere", f"run/../../etc/1@{platform.host()}", "", "1"):
            with pytest.raises(JobUnknown, match=r"is on elsewhere|is no id of"):
                executor.poll(Job("ssh", id, "run", "a", 1))
        with pytest.raises(BadInput, match="site"):
            executor.poll(Job("ssh", f"run/../1@{platform.host()}", "run", "..", 1))
        assert platform.machine.commands == []


# --- logs ------------------------------------------------------------------------------------------------------------


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
    with machines(tmp_path) as platform, hasty(platform) as executor:
        job = executor.submit(stage.spec(code))
        lines, read = executor.logs(job, follow=True), []
        for stop in (50, 150, 250):
            stage.await_mark(f"at{stop}")
            while len(read) < stop:
                read.append(next(lines))
            platform.cut()
            stage.mark(f"go{stop}")
        read += lines
        assert read == [f"{'half ' if n % 100 == 50 else ''}line {n}" for n in range(300)]


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_secrets_are_in_no_command_and_in_no_file_of_the_host(tmp_path: Path, stage: Stage) -> None:
    with machines(tmp_path) as platform, hasty(platform) as executor:
        spec = stage.spec("print(os.environ['TOKEN']); mark('up'); wait('go')", secrets={"TOKEN": SECRET})
        job = executor.submit(spec)
        stage.await_mark("up")
        left = platform.machine
        files = [path for path in left.home.rglob("*") if path.is_file()]
        assert left.commands and len(files) > 3
        assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
        assert not any(SECRET in command for command in left.commands)
        assert (left.home / ".composer-prime").stat().st_mode & 0o077 == 0
        stage.mark("go")
        await_end(executor, job)
