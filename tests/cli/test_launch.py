"""`launch`, `ps`, `logs` and `cancel`: what they print and refuse, from the bucket's URI alone."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import Job, JobSpec, Secrets
from composer_prime.executors.local import STATE_VARIABLE, LocalExecutor
from composer_prime.launch.records import LaunchBook, open_launch
from composer_prime.store import open_store
from tests.cli.command_line import assert_refused
from tests.executors.jobs import Stage
from tests.executors.loopback_local import LocalPlatform
from tests.executors.staged import StagedFleet, staged_book, staged_plan

RECIPE = str(Path(__file__).parents[2] / "recipes/local/two_sites.toml")
TOKEN = "hf_very-secret-0123456789"


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPlatform]:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    with closing(LocalPlatform(tmp_path / "state")) as opened:
        yield opened


class LaunchedByHand:
    """A launch of tiny jobs, as `launch` would have recorded it."""

    def __init__(self, folder: Path) -> None:
        self.stage = Stage(folder / "stage", "cli")
        self.uri = self.book().store.uri

    def start(self, site: str, code: str) -> Job:
        plan = replace(staged_plan("local", site), secrets=Secrets({"HF_TOKEN": TOKEN}))
        with closing(StagedFleet(self.stage.folder, code)) as fleet:
            return fleet.start(plan, site, 1, 600)

    def book(self) -> LaunchBook:
        return staged_book(self.stage.folder)


@pytest.fixture
def launched(tmp_path: Path, platform: LocalPlatform) -> LaunchedByHand:
    return LaunchedByHand(tmp_path)


def test_ps_logs_and_cancel_need_the_buckets_uri_alone(cli, launched: LaunchedByHand) -> None:
    launched.start("a", "say(os.environ['HF_TOKEN']); mark('up'); wait('never')")
    job = launched.start("b", "say('b is here'); sys.exit(3)")
    launched.stage.await_mark("up")
    with closing(LocalPlatform(Path(launched.stage.folder).parent / "state").executor()) as executor:
        assert list(executor.logs(job, follow=True)) == ["b is here"]
        while not executor.poll(job).state.final:
            time.sleep(0.01)
    rows = [json.loads(line) for line in cli("ps", launched.uri, "--json").out.splitlines()]
    assert [(row["site"], row["state"], row["exit_code"]) for row in rows] == [
        ("a", "running", None),
        ("b", "failed", 3),
    ]
    table = cli("ps", launched.uri).out
    assert "running" in table and "failed" in table and launched.book().name in table
    assert cli("logs", launched.uri).out.splitlines() == ["a | [redacted]", "b | b is here"]
    assert cli("logs", launched.uri, "--site", "b", "--follow").out.splitlines() == ["b is here"]
    ended = cli("cancel", launched.uri)
    assert ended.code == 0 and "a attempt 1: cancelled" in ended.out and "runs any more" in ended.out
    assert "stopped on" in cli("ps", launched.uri).out
    again = cli("cancel", launched.uri)
    assert again.code == 0 and "attempt" not in again.out


def test_a_cancel_that_nobody_confirms_says_what_may_be_billed(
    cli, launched: LaunchedByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched.start("a", "mark('up'); wait('never')")
    launched.stage.await_mark("up")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("composer_prime.executors.shim.HOST", "another-machine")
        answer = cli("cancel", launched.uri)
    assert answer.code == 1 and "may still run and be billed" in answer.err
    assert cli("cancel", launched.uri).code == 0


def test_a_cancel_that_looks_in_the_wrong_place_confirms_nothing_and_nothing_begins_behind_it(
    cli, launched: LaunchedByHand, platform: LocalPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launched.start("a", "mark('up'); wait('never')")
    launched.stage.await_mark("up")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv(STATE_VARIABLE, str(tmp_path / "elsewhere"))
        answer = cli("cancel", launched.uri)
        assert (
            answer.code == 1
            and "unknown to its platform with this login" in answer.out
            and "may still run" in answer.err
        )
        assert "any more" not in answer.out
    assert len(platform.pids(job)) >= 1
    answer = cli("cancel", launched.uri)
    assert answer.code == 0 and "a attempt 1: cancelled" in answer.out and platform.pids(job) == []


def test_a_launch_whose_second_site_is_refused_leaves_nothing_running(
    cli, tmp_path: Path, platform: LocalPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = LocalExecutor.submit

    def refuse_right(self: LocalExecutor, spec: JobSpec) -> Job:
        if spec.site == "right":
            raise BadInput("402: no credit")
        return submit(self, replace(spec, command=("sleep", "600")))

    monkeypatch.setattr(LocalExecutor, "submit", refuse_right)
    answer = cli("launch", RECIPE, "--on", "local", "--sites", "left,right", "--output_dir", str(tmp_path / "out"))
    assert answer.code == 2 and answer.err.splitlines() == ["composer-prime: 402: no credit"], answer
    assert "left attempt 1: ended again" in answer.out
    with closing(open_store(str(tmp_path / "out/buckets/two-sites"))) as store:
        book = open_launch(store)
    states = {each.site: each.ended.state for each in book.attempts() if each.ended is not None}
    assert states == {"left": "withdrawn", "right": "refused"}
    jobs = platform.executor().find(book.name)
    assert [job.site for job in jobs] == ["left"] and platform.pids(jobs[0]) == []


def test_a_detached_launch_that_could_not_start_a_site_says_so(
    cli, tmp_path: Path, platform: LocalPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LocalExecutor, spec: JobSpec) -> Job:
        raise ExecutorError("the disk is full")

    monkeypatch.setattr(LocalExecutor, "submit", fail)
    arguments = ("launch", RECIPE, "--on", "local", "--detach", "--output_dir", str(tmp_path / "out"))
    answer = cli(*arguments, "--sites", "left")
    assert answer.code == 1 and "not seen to run: left (the disk is full)" in answer.err


def test_a_folder_without_a_launch_is_refused(cli, tmp_path: Path) -> None:
    for command in ("ps", "logs", "cancel"):
        assert_refused(cli(command, str(tmp_path / "nothing")), "holds no launch", "composer-prime launch")


def test_a_dry_run_starts_and_writes_nothing(cli, tmp_path: Path, platform: LocalPlatform) -> None:
    places = ("--output_dir", str(tmp_path / "out"), "--launch.caches.weights", str(tmp_path / "cache"))
    answer = cli("launch", RECIPE, "--on", "local", "--dry-run", "--replicas", "3", *places)
    assert answer.code == 0 and "site r2 on local" in answer.out and "$0.00 an hour" in answer.out
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_can_not_be_made_is_refused(cli, tmp_path: Path, platform: LocalPlatform) -> None:
    (tmp_path / "file").touch()
    places = ("--output_dir", str(tmp_path / "out"), "--launch.caches.weights", str(tmp_path / "file" / "cache"))
    answer = cli("launch", RECIPE, "--on", "local", "--dry-run", *places)
    assert answer.code == 2 and f"{tmp_path / 'file'} is no folder: give a folder" in answer.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--on", "moon"), "is no platform"),
        (("--on", "modal", "--dry-run"), "s3://"),
        (("--on", "local", "--secret", "NOT_SET_ANYWHERE"), "export NOT_SET_ANYWHERE"),
        (("--on", "local", "--sites", "a,a"), "must differ"),
    ],
    ids=["platform", "bucket", "secret", "sites"],
)
def test_what_can_not_be_launched_is_refused_in_one_line(
    cli, tmp_path: Path, platform: LocalPlatform, arguments: tuple[str, ...], said: str
) -> None:
    assert_refused(cli("launch", RECIPE, *arguments, "--output_dir", str(tmp_path / "out")), said)
    assert not (tmp_path / "out").exists() and not (tmp_path / "state").exists()


@pytest.mark.parametrize("on", ["modal", "hf-jobs", "ssh:gpu1", "modal:1,hf-jobs:1"])
def test_a_dry_run_needs_no_login_and_loads_no_torch(on: str, tmp_path: Path) -> None:
    arguments = ["composer-prime", "launch", RECIPE, "--on", on, "--outer.store", "s3://b/r", "--dry-run"]
    command = (
        "import sys; sys.modules['torch'] = None; from composer_prime.cli.main import main; "
        f"sys.argv = {arguments!r}; main()"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "nothing was started" in done.stdout, done.stderr


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["launch", "dry run"])
@pytest.mark.parametrize("said", [(), ("--usd-per-hour", "0")], ids=["own price", "said"])
def test_a_limit_on_cost_where_jobs_cost_nothing_is_refused_and_nothing_starts(
    cli, tmp_path: Path, platform: LocalPlatform, dry: tuple[str, ...], said: tuple[str, ...]
) -> None:
    arguments = ("launch", RECIPE, "--on", "local", "--max-cost", "5", "--output_dir", str(tmp_path / "out"))
    why = "(--usd-per-hour)" if said else "(this machine)"
    assert_refused(cli(*arguments, *dry, *said), "--max-cost (5)", f"costs $0 {why}", "--usd-per-hour", "--max-hours")
    assert not (tmp_path / "state").exists()
    answer = cli(*arguments, "--dry-run", "--usd-per-hour", "2.5")
    assert answer.code == 0 and "$2.50 an hour (--usd-per-hour); ends by itself after 0.9" in answer.out


def test_a_replica_that_nobody_launched_is_refused(cli, launched: LaunchedByHand) -> None:
    launched.start("a", "pass")
    named = ("--launch", "1", "--attempt", "1", "--recipe", "0" * 64)
    assert_refused(cli("replica", launched.uri, *named, "--site", "b"), "no site b: it has a")
    launched.book().stop()
    assert_refused(cli("replica", launched.uri, *named, "--site", "a"), "was stopped")


def test_replica_is_not_in_the_list_of_commands(cli) -> None:
    listed = cli("--help").out
    assert "launch" in listed and "cancel" in listed and "replica" not in listed.replace("replicas", "")
