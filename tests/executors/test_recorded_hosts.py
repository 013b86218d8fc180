"""A launch's hosts in the bucket: its jobs are reached from a machine without the hosts file, and what hostile records
say is refused."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import Job
from composer_prime.executors.ssh.executor import SshExecutor
from composer_prime.executors.ssh.hosts import Host
from composer_prime.executors.ssh.link import Patience
from composer_prime.executors.ssh.names import written_out
from composer_prime.launch.fleet import Fleet
from composer_prime.launch.plan import LaunchOptions, plan_launch
from composer_prime.launch.recorded_hosts import RECORDED, Hosts, hosts_to_use, keep_hosts
from composer_prime.launch.records import LaunchBook, begin_launch
from composer_prime.store import launch_keys, open_store
from composer_prime.store.memory import MemoryStore
from composer_prime.sync.canonical import canonical
from tests.architecture import REPOSITORY
from tests.executors.jobs import FOREVER, Stage
from tests.executors.launches import empty_bucket, small_recipe
from tests.executors.loopback_ssh import USER, SshPlatform
from tests.executors.staged import StagedFleet, staged_book, staged_plan
from tests.patience import PATIENCE_S

HASTY = Patience(pauses_s=(), connect_s=5.0, call_s=20.0)
ON = "ssh:/nowhere/hosts.toml"


class Launched:
    """One job over ssh on a machine of this one, and another machine that knows the bucket alone."""

    def __init__(self, folder: Path, platform: SshPlatform, stage: Stage) -> None:
        self.platform, self.stage = platform, stage
        self.uri = staged_book(stage.folder).store.uri
        self.home = folder / "elsewhere"
        """Whose ~/.ssh the other machine's ssh client reads."""
        (self.home / ".ssh").mkdir(parents=True)
        for name, copy in (("known_hosts", "known_hosts"), ("id_ed25519", "id_ed25519")):
            shutil.copy(platform.folder / name, self.home / ".ssh" / copy)

    def start(self) -> Job:
        plan = staged_plan(self.platform.launch_option(), "a")
        with closing(StagedFleet(self.stage.folder, f"say('up'); mark('up'); {FOREVER}")) as fleet:
            job = fleet.start(plan, "a", 1, 600)
        self.stage.await_mark("up")
        self.platform.hosts_file.unlink()
        return job

    def elsewhere(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command in a fresh process, folder and home."""
        return subprocess.run(
            [sys.executable, "-m", "composer_prime.cli.main", *arguments],
            cwd=self.home,
            env={"HOME": str(self.home), "PATH": os.defpath, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def row(self) -> dict[str, Any]:
        """What `ps` says there of the one job."""
        done = self.elsewhere("ps", self.uri, "--json")
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        return json.loads(line)


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Stage:
    return Stage(tmp_path / "stage", request.function.__name__.removeprefix("test_"))


@pytest.fixture
def launched(tmp_path: Path, stage: Stage) -> Iterator[Launched]:
    with closing(SshPlatform(tmp_path / "machines", ("left",), 4)) as platform:
        yield Launched(tmp_path, platform, stage)


def book() -> LaunchBook:
    return begin_launch(empty_bucket(), "small")


@contextmanager
def of_record(platform: SshPlatform, **changes: Any) -> Iterator[SshExecutor]:
    """An executor for the loopback's machine as a bucket would describe it."""
    machine = platform.machines["left"]
    table = {"address": "127.0.0.1", "port": machine.port, "user": USER, "python": sys.executable, **changes}
    with closing(SshExecutor.of_record({"left": Host(**table)}, "s3://b/run", grace_s=1.0, patience=HASTY)) as executor:
        yield executor


# --- from another machine --------------------------------------------------------------------------------------------


def test_ps_logs_and_cancel_work_on_another_machine_with_the_bucket_alone(launched: Launched) -> None:
    launched.start()
    assert launched.row()["state"] == "running"
    printed = launched.elsewhere("logs", launched.uri)
    assert (printed.returncode, printed.stdout) == (0, "up\n"), printed
    ended = launched.elsewhere("cancel", launched.uri)
    assert ended.returncode == 0 and "nothing of " in ended.stdout, ended
    assert launched.row()["state"] == "cancelled"


def test_a_machine_that_the_host_does_not_admit_says_what_the_launch_used(launched: Launched) -> None:
    launched.start()
    (launched.home / ".ssh" / "id_ed25519").unlink()
    said = launched.row()["message"]
    assert f"refuses the agent's keys and those in ~/.ssh for user {USER}" in said
    key = launched.platform.folder / "id_ed25519"
    assert key.is_file() and f"records it and its launch used the key {key}: where that won't do here" in said


def test_a_host_that_this_machine_does_not_know_is_refused_though_the_bucket_names_it(launched: Launched) -> None:
    launched.start()
    before = len(launched.platform.machines["left"].commands)
    (launched.home / ".ssh" / "known_hosts").write_text("")
    assert "doesn't hold the key that it shows" in launched.row()["message"]
    assert len(launched.platform.machines["left"].commands) == before, "something was sent"


def test_the_file_that_is_given_wins_and_is_not_replaced_where_it_is_not_there(launched: Launched) -> None:
    text = launched.platform.hosts_file.read_text()
    launched.start()
    (launched.home / "mine.toml").write_text(text.replace("[hosts.left]", "[hosts.other]"))
    done = launched.elsewhere("logs", launched.uri, "--on", "ssh:mine.toml")
    assert done.returncode == 1 and "host left, which" in done.stderr and "mine.toml doesn't name" in done.stderr
    done = launched.elsewhere("logs", launched.uri, "--on", "ssh:none.toml")
    assert done.returncode == 2 and "none.toml can't be read" in done.stderr


# --- what is recorded, and when --------------------------------------------------------------------------------------


def test_hosts_are_recorded_before_the_intent_and_without_secrets_or_keys(launched: Launched) -> None:
    launched.platform.set_host("left", env={"PYTHONPATH": str(REPOSITORY), "A_TOKEN": "tok-0123456789"})
    keys: list[str] = []

    class Watched(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            keys.append(key)
            assert b"tok-0123456789" not in data and b"PRIVATE KEY" not in data and b"known_hosts" not in data
            return super().create(key, data)

    with closing(Fleet(begin_launch(Watched("watched", "small"), "small"))) as fleet:
        options = LaunchOptions(usd_per_hour=0.0, environment={}, image="any")
        plan = plan_launch(small_recipe(), launched.platform.launch_option(), options)
        fleet.start(plan, "a", 1, 600)
        table = Hosts.from_bytes(fleet.book.store.get(launch_keys.hosts(1, 1)), "hosts").hosts["left"]
        list(fleet.cancel())
    assert keys.index(launch_keys.hosts(1, 1)) < keys.index(launch_keys.intent(1, "a", 1))
    assert set(table) == set(RECORDED)
    assert (table["user"], table["key"]) == (USER, str(launched.platform.folder / "id_ed25519"))


def test_a_changed_file_gets_a_further_record_and_of_a_host_the_newest_counts() -> None:
    launch = book()
    keep_hosts(launch, ON, {"a": Host(address="10.0.0.1"), "gone": Host(address="10.0.0.9")})
    keep_hosts(launch, ON, {"a": Host(address="10.0.0.1"), "gone": Host(address="10.0.0.9")})
    keep_hosts(launch, ON, {"a": Host(address="10.0.0.2")})
    assert len(launch.store.list(launch_keys.hosts_prefix(1))) == 2
    found = hosts_to_use(launch, ON)
    assert found is not None and {name: host.address for name, host in found.items()} == {
        "a": "10.0.0.2",
        "gone": "10.0.0.9",
    }


def test_hosts_of_one_name_in_two_files_are_told_apart_by_the_file() -> None:
    launch = book()
    for place, address in (("x", "10.0.0.1"), ("y", "10.0.0.2")):
        keep_hosts(launch, f"ssh:/{place}/hosts.toml", {"a": Host(address=address)})
    for place, address in (("x", "10.0.0.1"), ("y", "10.0.0.2")):
        found = hosts_to_use(launch, f"ssh:/{place}/hosts.toml")
        assert found is not None and found["a"].address == address


def test_the_file_itself_is_read_where_it_is_there_and_where_nothing_was_recorded(tmp_path: Path) -> None:
    launch = book()
    assert hosts_to_use(launch, ON) is None
    keep_hosts(launch, ON, {"a": Host(address="10.0.0.1")})
    assert hosts_to_use(launch, ON) is not None and hosts_to_use(launch, "modal") is None
    (tmp_path / "hosts.toml").write_text("")
    assert hosts_to_use(launch, f"ssh:{tmp_path / 'hosts.toml'}") is None


def test_a_file_that_anybody_may_write_is_not_read_because_the_bucket_names_it(tmp_path: Path) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text("[hosts.a]\naddress = 'planted'")
    file.chmod(0o666)
    launch = book()
    with pytest.raises(BadInput, match=r"isn't yours alone to write.*--on ssh:.*if you trust it"):
        hosts_to_use(launch, f"ssh:{file}")
    keep_hosts(launch, ON, {"a": Host(address="10.0.0.1")})
    found = hosts_to_use(launch, f"ssh:{file}")
    assert found is not None and found["a"].address == "10.0.0.1"
    file.chmod(0o644)
    assert hosts_to_use(launch, f"ssh:{file}") is None


def test_what_ssh_configuration_and_login_add_is_written_out(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host box\n HostName 10.0.0.7\n Port 2200\n User me\n ProxyJump gate\n"
        "Host gate\n HostName gate.example.com\n User you\n"
    )
    env = {"A_TOKEN": "tok-0123456789"}
    host = written_out("a", Host(address="box", ssh_config=str(config), known_hosts="/k", env=env, slots=2))
    assert (host.address, host.port, host.user) == ("10.0.0.7", 2200, "me")
    assert host.proxy_jump == "you@gate.example.com:22" and host.slots == 2
    assert (host.env, host.known_hosts, host.ssh_config) == ({}, "~/.ssh/known_hosts", "~/.ssh/config")
    assert written_out("a", Host(address="10.0.0.8", ssh_config="")).user, "the login here"


def test_a_host_behind_a_proxy_command_is_said_to_need_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config").write_text("Host box\n ProxyCommand nc %h %p\n")
    written_out("a", Host(address="box", ssh_config=str(tmp_path / "config")))
    assert "reached by a ProxyCommand" in caplog.text and "--on ssh:FILE" in caplog.text


# --- a bucket that somebody else writes ------------------------------------------------------------------------------

SOUND = {"address": "10.0.0.1", "user": "me", "port": 22}
HOSTILE: Mapping[str, dict[str, Any]] = {
    "an option as address": {"address": "-oProxyCommand=touch x"},
    "a command as address": {"address": "$(touch x)"},
    "a second command": {"address": "a;touch x"},
    "a line end": {"address": "a\nb"},
    "an option as user": {"user": "-oProxyCommand=x"},
    "a command as user": {"user": "`touch x`"},
    "an open quote": {"user": "me\\"},
    "an option as jump": {"proxy_jump": "-oProxyCommand=touch"},
    "a command as jump": {"proxy_jump": "a@$(touch)"},
    "a password in a jump": {"proxy_jump": "me:secret@gate"},
    "jumps without end": {"proxy_jump": ",".join(["gate"] * 9)},
    "a port of words": {"port": "22; touch x"},
    "a port that is none": {"port": 70000},
    "another program": {"python": "/bin/rm"},
    "an option as program": {"python": "-c"},
    "a folder above": {"workdir": "/tmp/../etc"},
    "a terminal's escapes": {"workdir": "\x1b]0;x\x07"},
    "a private key": {"key": "-----BEGIN OPENSSH PRIVATE KEY----- tok"},
    "a configuration": {"ssh_config": "/tmp/config"},
    "keys of hosts": {"known_hosts": "/tmp/known"},
    "variables": {"env": "LD_PRELOAD"},
    "a proxy command": {"proxy_command": "touch x"},
    "no address": {"address": None},
    "half a machine": {"slots": 0},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_record_is_refused_in_one_line(what: str) -> None:
    launch = book()
    table = {name: value for name, value in {**SOUND, **HOSTILE[what]}.items()}
    record = {"on": ON, "hosts": {"a": SOUND, "b": table}, "created_at": 0.0, "created_by": "eve"}
    launch.store.create(launch_keys.hosts(1, 1), canonical(record))
    with pytest.raises(BadInput, match=r"aren't used: .*Give a hosts file of your own by --on ssh:FILE") as refused:
        hosts_to_use(launch, ON)
    assert str(refused.value).isprintable() and "tok" not in str(refused.value)


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"[hosts.a]",
        canonical({"on": ON, "hosts": {}, "created_at": 0.0, "created_by": "eve"}),
        canonical({"on": ON, "hosts": {"../a": SOUND}, "created_at": 0.0, "created_by": "eve"}),
        canonical({"on": ON, "hosts": {"a": SOUND}, "created_at": 0.0, "created_by": "eve", "x": 1}),
        canonical({"on": ON, "hosts": {"a" * 63: SOUND}, "created_at": 0.0, "created_by": "e" * 2**22}),
    ],
    ids=["empty", "no JSON", "no host", "a path as name", "a strange field", "too large"],
)
def test_a_record_of_another_shape_is_refused_and_a_launch_writes_its_own_behind_it(record: bytes) -> None:
    launch = book()
    launch.store.create(launch_keys.hosts(1, 1), record)
    with pytest.raises(BadInput, match="aren't used"):
        hosts_to_use(launch, ON)
    keep_hosts(launch, ON, {"a": Host(address="10.0.0.1")})
    assert len(launch.store.list(launch_keys.hosts_prefix(1))) == 2


def test_a_hostile_record_is_a_jobs_own_trouble_and_reaches_no_machine(launched: Launched) -> None:
    launched.start()
    before = len(launched.platform.machines["left"].commands)
    with closing(open_store(launched.uri)) as store:
        record = json.loads(store.get(launch_keys.hosts(1, 1)))
        record["hosts"]["left"]["proxy_jump"] = "-oProxyCommand=touch"
        store.put(launch_keys.hosts(1, 1), canonical(record))
    row = launched.row()
    assert row["state"] == "unknown" and "proxy_jump (-oProxyCommand=touch) must be" in row["message"]
    assert launched.elsewhere("logs", launched.uri).returncode == 2
    ended = launched.elsewhere("cancel", launched.uri)
    assert ended.returncode == 1 and "may still run" in ended.stderr
    assert len(launched.platform.machines["left"].commands) == before


def test_no_key_is_read_where_a_record_says(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(launched.home))
    monkeypatch.setenv("SSH_AUTH_SOCK", "")
    mine = launched.home / ".ssh" / "id_ed25519"
    moved = mine.rename(launched.home / "another")
    with of_record(launched.platform, key=str(moved)) as executor, pytest.raises(BadInput, match="refuses the agent's"):
        executor.find("run")


@pytest.mark.parametrize("mode", [0o777, None])
def test_nothing_is_taken_from_a_folder_that_others_may_write_or_that_is_not_there(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, mode: int | None
) -> None:
    monkeypatch.setenv("HOME", str(launched.home))
    monkeypatch.setenv("SSH_AUTH_SOCK", "")
    folder = launched.home / "work"
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    said = "isn't there, so no job" if mode is None else "belongs to another user, or any may write there"
    with of_record(launched.platform, workdir=str(folder)) as executor, pytest.raises(ExecutorError, match=said):
        executor.find("run")
    assert not (folder / "code").exists()


def test_a_record_starts_no_jobs(launched: Launched) -> None:
    with of_record(launched.platform) as executor, pytest.raises(BadInput, match=r"starts no jobs.*--on ssh:FILE"):
        executor.submit(launched.stage.spec("pass"))
    assert launched.platform.machines["left"].commands == []


def test_a_key_in_a_hosts_file_is_refused_and_not_shown(tmp_path: Path) -> None:
    key = asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()
    (tmp_path / "hosts.toml").write_text(f"[hosts.a]\naddress = 'x'\nkey = '''{key}'''")
    assert tomllib.loads((tmp_path / "hosts.toml").read_text())["hosts"]["a"]["key"].startswith("-----BEGIN")
    with pytest.raises(BadInput, match="key must be the path of") as refused:
        SshExecutor(tmp_path / "hosts.toml")
    assert key.splitlines()[1] not in str(refused.value)
