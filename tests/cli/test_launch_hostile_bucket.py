"""`launch`, `replica`, `ps`, `logs`, `cancel` over a bucket in which somebody else writes: nothing of theirs runs."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import KeyMissing
from composer_prime.executors.base import Job, JobSpec
from composer_prime.executors.local import STATE_VARIABLE, LocalExecutor
from composer_prime.launch import launch_keys
from composer_prime.launch.records import LaunchBook, open_launch
from composer_prime.store import open_store
from composer_prime.sync.canonical import canonical, sha256_hex
from tests.cli.command_line import Answer, call
from tests.executors.jobs import FOREVER
from tests.executors.loopback_local import LocalPlatform
from tests.executors.staged import StagedFleet, staged_plan

RECIPE = str(Path(__file__).parents[2] / "recipes/local/two_sites.toml")
PYTHON = (sys.executable, "-m", "composer_prime.cli.main")


class Killed(BaseException):
    """The launcher's end in the middle of a call."""


class Machine:
    """This machine with a folder as the bucket, and somebody else who writes there. Code of theirs would leave a file
    that is named planted."""

    def __init__(self, folder: Path, cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.cli, self.monkeypatch = folder, cli, monkeypatch
        self.platform = LocalPlatform(folder / "state")
        self.uri = str(folder / "out/buckets/two-sites")
        self.submitted: list[JobSpec] = []

    def launch(self, *arguments: str) -> Answer:
        """The command of the bucket's owner."""
        places = ("--output_dir", str(self.folder / "out"))
        return self.cli("launch", RECIPE, "--on", "local", "--sites", "left", "--detach", *places, *arguments)

    def kill_a_launcher(self) -> None:
        """Leave an intent whose launcher was killed before it was submitted."""

        def die(executor: LocalExecutor, spec: JobSpec) -> Job:
            raise Killed

        with self.monkeypatch.context() as patched:
            patched.setattr(LocalExecutor, "submit", die)
            with pytest.raises(Killed):
                self.launch()
        assert self.jobs() == []

    def book(self) -> LaunchBook:
        return open_launch(open_store(self.uri))

    def jobs(self) -> list[Job]:
        with closing(self.platform.executor()) as executor:
            return executor.find(self.book().name)


def forge(uri: str, key: str, **changes: Any) -> None:
    """Change a record of a bucket, or write one."""
    with closing(open_store(uri)) as store:
        try:
            old = json.loads(store.get(key))
        except KeyMissing:
            old = {}
        store.put(key, canonical({**old, **changes}))


@pytest.fixture
def machine(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    monkeypatch.setenv("UNRELATED", "a-secret-that-no-plan-names")
    found = Machine(tmp_path, lambda *arguments: call(capsys, monkeypatch, *arguments), monkeypatch)
    with closing(found.platform):
        yield found
    assert list(tmp_path.rglob("planted")) == [], "code of theirs ran"


def assert_one_line(answer: Answer, code: int, *parts: str) -> None:
    assert (answer.code, answer.err.count("\n")) == (code, 1), answer
    assert all(part in answer.err for part in parts), answer.err
    assert answer.err.removesuffix("\n").isprintable(), answer.err


# --- what is submitted -----------------------------------------------------------------------------------------------


INTENT = launch_keys.intent(1, "left", 1)
FORGED: dict[str, dict[str, Any]] = {
    "another job": {"spec": "0" * 64},
    "time": {"timeout_s": 10**7},
    "platform": {"on": "modal"},
    "a host": {"on": "ssh:theirs"},
}
"""All that a record can say of what runs: it holds neither command nor variables nor image."""


@pytest.mark.parametrize("what", FORGED)
def test_an_intent_that_somebody_else_wrote_is_refused_and_nothing_is_started(machine: Machine, what: str) -> None:
    machine.kill_a_launcher()
    forge(machine.uri, INTENT, **FORGED[what])
    answer = machine.launch()
    cancel = f"composer-prime cancel file://{machine.uri}"
    assert_one_line(answer, 2, f"{INTENT} is of another job", "isn't started", cancel)
    assert machine.jobs() == [] and answer.out == ""
    assert len(machine.book().attempts()) == 1, "another attempt began"


def test_an_intent_for_an_attempt_to_come_is_refused_when_its_turn_comes(machine: Machine) -> None:
    machine.kill_a_launcher()
    old = json.loads(open_store(machine.uri).get(INTENT))
    forge(machine.uri, launch_keys.intent(1, "left", 2), **{**old, "spec": "0" * 64})
    assert_one_line(machine.launch(), 2, f"{launch_keys.intent(1, 'left', 2)} is of another job")
    assert machine.jobs() == []


def test_an_intent_of_a_killed_launcher_is_started_by_the_same_command_and_a_new_launch_follows_a_forged_one(
    machine: Machine,
) -> None:
    machine.kill_a_launcher()
    forge(machine.uri, INTENT, spec="0" * 64)
    assert machine.launch().code == 2
    assert machine.cli("cancel", machine.uri).code == 0
    submit = LocalExecutor.submit

    def sleep(executor: LocalExecutor, spec: JobSpec) -> Job:
        machine.submitted.append(spec)
        return submit(executor, replace(spec, command=("sleep", "600")))

    machine.kill_a_launcher()
    machine.monkeypatch.setattr(LocalExecutor, "submit", sleep)
    assert machine.launch().code == 0
    (spec,), (mine,) = machine.submitted, machine.book().attempts()
    assert spec.sha256 == mine.record.spec and spec.command[-2] == "--recipe"
    assert machine.cli("cancel", machine.uri).code == 0


# --- what a replica runs ---------------------------------------------------------------------------------------------


def test_a_replica_runs_no_recipe_but_the_one_that_its_command_line_names(machine: Machine) -> None:
    machine.kill_a_launcher()
    bucket = open_store(machine.uri)
    (kept,) = (key for key in bucket.list("launches/") if "recipes/" in key)
    sha = sha256_hex(bucket.get(kept))
    replica = ("replica", machine.uri, "--launch", "1", "--site", "left", "--attempt", "1", "--recipe", sha)
    (machine.folder / "theirs.py").write_text(f"open({str(machine.folder / 'planted')!r}, 'w')")
    machine.monkeypatch.syspath_prepend(str(machine.folder))
    text = re.sub('import_path = ".*loss.*"', 'import_path = "theirs.loss"', bucket.get(kept).decode())
    assert "theirs.loss" in text
    with closing(open_store(machine.uri)) as store:
        store.put(launch_keys.recipe(sha), text.encode())
        store.put(launch_keys.recipe(sha256_hex(text.encode())), text.encode())
    for answer in (machine.launch(), machine.cli(*replica)):
        assert_one_line(answer, 1, "is not what was launched: its sha256 differs")
    assert machine.jobs() == []


# --- whose job is shown, and ended -----------------------------------------------------------------------------------


def test_a_launch_that_names_another_runs_jobs_shows_and_ends_none_of_them(machine: Machine) -> None:
    theirs, mine = (stage_a_job(machine, name) for name in ("theirs", "mine"))
    forge(theirs.book.store.uri, launch_keys.launch(1), name=mine.book.name)
    for command in ("ps", "logs", "cancel"):
        answer = machine.cli(command, theirs.book.store.uri)
        assert_one_line(answer, 1, f"says launch 1 and name {mine.book.name}", "no launch 1 of theirs is called so")
        assert answer.out == ""
    assert len(machine.platform.pids(job_of(machine, mine))) >= 1


def test_a_record_that_names_another_job_hides_not_the_attempts_own(machine: Machine) -> None:
    staged = stage_a_job(machine, "mine", "a", "b")
    uri = staged.book.store.uri
    a, b = machine.platform.executor().find(staged.book.name)
    forge(uri, launch_keys.job(1, "a", 1), id=b.id)
    forge(uri, launch_keys.intent(1, "a", 1), created_at=0.0)  # or its time would not have passed
    assert machine.cli("cancel", uri, "--site", "a").out.splitlines() == ["a attempt 1: cancelled", "a runs no more"]
    assert machine.platform.pids(a) == [] and len(machine.platform.pids(b)) >= 1
    forge(uri, launch_keys.job(1, "b", 1), id=a.id)
    assert_one_line(machine.cli("logs", uri, "--site", "b"), 1, "is no id of attempt 1 of")
    assert machine.cli("cancel", uri).code == 0 and machine.platform.pids(b) == []


def stage_a_job(machine: Machine, name: str, *sites: str) -> StagedFleet:
    """A launch of jobs that run and say whose they are."""
    folder = machine.folder / name / "stage"
    folder.mkdir(parents=True)
    with closing(StagedFleet(folder, f"say('{name}'); mark('up-' + sys.argv[2]); {FOREVER}")) as fleet:
        for site in sites or ("a",):
            fleet.start(staged_plan("local", site), site, 1, 600)
    return fleet


def job_of(machine: Machine, fleet: StagedFleet) -> Job:
    (job,) = machine.platform.executor().find(fleet.book.name)
    return job


# --- what is read ----------------------------------------------------------------------------------------------------

ESCAPE = "\x1b]0;theirs\x07"
END = {
    "state": "failed",
    "exit_code": 1,
    "seconds": 1.0,
    "message": "",
    "ended_at": 1.0,
}
HUNG = {"state": "hung", "why": "", "by": "me"}
KEYS = {
    "launch": launch_keys.launch(1),
    "intent": launch_keys.intent(1, "a", 1),
    "job": launch_keys.job(1, "a", 1),
    "end": launch_keys.end(1, "a", 1),
    "attempt's stop": launch_keys.stop(1, "a", 1),
    "stop": launch_keys.stop(1),
}
UNSOUND = [
    *(("launch", "name", value) for value in (ESCAPE, "x" * 5000)),
    ("launch", "number", 2),
    *(("intent", field, ESCAPE) for field in ("on", "account", "spec")),
    ("intent", "on", "x" * 5000),
    ("intent", "spec", "../../x"),
    ("intent", "secrets", ["\u202ex"]),
    ("intent", "timeout_s", 10**30),
    ("intent", "overrun_s", 10**30),
    ("intent", "usd_per_hour", -1.0),
    ("intent", "created_at", 1e300),
    ("intent", "created_at", -1.0),
    ("intent", ESCAPE, "a strange field"),
    ("job", "id", ESCAPE),
    ("job", "id", "x" * 5000),
    ("end", "message", ESCAPE),
    ("end", "message", "x" * 5000),
    ("end", "seconds", -1.0),
    ("end", "exit_code", 10**30),
    ("end", "ended_at", 1e300),
    ("attempt's stop", "why", ESCAPE),
    ("attempt's stop", "by", ESCAPE),
    ("attempt's stop", "state", "done"),
    ("stop", "by", ESCAPE),
    ("stop", "why", "x" * 5000),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, bytes]]]:
    """The bucket of a launch with each kind of record, and what stands in it."""
    folder = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(STATE_VARIABLE, str(folder / "state"))
        with closing(LocalPlatform(folder / "state")):
            stage = folder / "run" / "stage"
            stage.mkdir(parents=True)
            with closing(StagedFleet(stage, "pass")) as fleet:
                fleet.start(staged_plan("local", "a"), "a", 1, 600)
            fleet.book.stop()
            forge(fleet.book.store.uri, KEYS["end"], **END)
            forge(fleet.book.store.uri, KEYS["attempt's stop"], **HUNG)
            store = fleet.book.store
            yield Path(store.uri.removeprefix("file://")), {key: store.get(key) for key in store.list("")}


@pytest.mark.parametrize(("kind", "field", "value"), UNSOUND, ids=lambda value: ascii(value)[:24])
def test_a_record_with_a_field_of_another_kind_or_size_is_refused_by_name(
    machine: Machine, sound: tuple[Path, dict[str, bytes]], kind: str, field: str, value: object
) -> None:
    folder, records = sound
    uri = str(machine.folder / folder.name)
    with closing(open_store(uri)) as store:
        for key, data in records.items():
            store.put(key, data)
    assert machine.cli("ps", uri).code == 0
    forge(uri, KEYS[kind], **{field: value})
    answer = machine.cli("ps", uri)
    named = {"number": "launch 2"}.get(field, ascii(field)[1:-1])
    assert_one_line(answer, 1, KEYS[kind], named)
    assert len(answer.err) < 1000 and answer.out == ""
