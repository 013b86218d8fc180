"""A supervisor that is a job: one at a time, told by a hash, handed over before its time is over."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from composer_prime.errors import BadInput, CorruptObject, ExecutorError
from composer_prime.executors.base import JobState
from composer_prime.launch import launch_keys
from composer_prime.launch.budget import Limits
from composer_prime.launch.fleet import Fleet
from composer_prime.launch.plan import LaunchPlan, plan_launch
from composer_prime.launch.records import LaunchBook, begin_launch, open_launch
from composer_prime.launch.supervisor_job import (
    HOST_TIMEOUT_S,
    LOGIN_PREFIX,
    SITE,
    order_of,
    start_supervisor,
    supervise,
)
from composer_prime.store import open_store
from tests.executors.launches import ENVIRONMENT, SECRET, small_recipe
from tests.executors.scripted import ScriptedPlatform

LIMITS = Limits(max_usd=7.5, hang_after_s=None)
TOKEN = "very-secret-moon-token"


@dataclass
class Scene:
    """A launch in a folder, on one scripted platform, with a supervisor that is a job."""

    folder: Path
    platform: ScriptedPlatform = field(default_factory=lambda: ScriptedPlatform(usd_per_hour=0.05))
    said: list[str] = field(default_factory=list)

    @property
    def plan(self) -> LaunchPlan:
        recipe = small_recipe(outer={"store": str(self.folder)}, launch={"image": "any"})
        return plan_launch(recipe, "local", environment=ENVIRONMENT)

    @property
    def book(self) -> LaunchBook:
        return begin_launch(open_store(self.plan.run_uri), "small")

    def start(self) -> tuple[str, bool]:
        """As `launch --supervise-on` does."""
        plan = self.plan
        order = order_of(plan, "local", LIMITS, 0.01, lambda on: self.platform)
        return start_supervisor(Fleet(self.book, opener=lambda on: self.platform), order)

    def run(self, job: str) -> int:
        """What the job's command does, in an environment as its platform makes it."""
        spec, _ = self.platform.jobs[job]
        os.environ.update({**spec.env, **spec.secrets.reveal()})
        _, command, uri, *options = spec.command
        assert command == "supervise" and options[::2] == ["--launch", "--attempt", "--order"]
        launch, attempt, order = options[1::2]
        opener = lambda on: self.platform  # noqa: E731
        return supervise(uri, int(launch), int(attempt), order, self.said.append, opener=opener)

    def end_sites(self) -> None:
        for site in self.plan.sites:
            self.platform.ends(f"{self.book.name}--{site}--1", JobState.SUCCEEDED, 0)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    for name in (*ENVIRONMENT, "MOON_TOKEN", LOGIN_PREFIX + "MOON_TOKEN", "COMPOSER_PRIME_SECRETS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return Scene(tmp_path)


def test_the_job_starts_the_sites_as_the_launcher_would_and_ends_with_them(scene: Scene) -> None:
    job, is_new = scene.start()
    assert is_new and list(scene.platform.jobs) == [job]
    scene.platform.on_submit.append(lambda: len(scene.platform.jobs) == 3 and scene.end_sites())
    assert scene.run(job) == 0
    spec, _ = scene.platform.jobs[f"{scene.book.name}--a--1"]
    assert spec.command[1:] and spec.image == "any"
    assert spec.secrets.reveal() == {"HF_TOKEN": SECRET} and "AWS_ENDPOINT_URL" in spec.env
    assert os.environ["MOON_TOKEN"] == TOKEN and LOGIN_PREFIX + "MOON_TOKEN" not in os.environ


def test_a_site_that_failed_in_the_end_is_its_exit_code(scene: Scene) -> None:
    job, _ = scene.start()
    fails = lambda: [scene.platform.ends(id, JobState.FAILED, 2) for id in scene.platform.jobs if SITE not in id]  # noqa: E731
    scene.platform.on_submit.append(fails)
    assert scene.run(job) == 1


def test_the_same_command_finds_the_supervisor_and_another_follows_one_that_ended(scene: Scene) -> None:
    job, _ = scene.start()
    assert scene.start() == (job, False)
    scene.platform.ends(job, JobState.PREEMPTED)
    second, is_new = scene.start()
    assert is_new and second == f"{scene.book.name}--{SITE}--2"


def test_one_that_was_only_meant_is_started_as_that_attempt(scene: Scene) -> None:
    scene.platform.fail = 1
    with pytest.raises(ExecutorError):
        scene.start()
    scene.platform.fail = 0
    job, is_new = scene.start()
    assert is_new and job == f"{scene.book.name}--{SITE}--1" and len(scene.platform.jobs) == 1


def test_a_record_of_a_job_that_the_platform_does_not_have_keeps_no_supervisor_away(scene: Scene) -> None:
    """Whoever can write the bucket can write that one runs."""
    first, _ = scene.start()
    del scene.platform.jobs[first]
    second, is_new = scene.start()
    assert is_new and second == f"{scene.book.name}--{SITE}--2"
    scene.platform.fail = 99
    with pytest.raises(ExecutorError, match="whether attempt 2 of the supervisor runs isn't known"):
        scene.start()


def test_before_its_time_is_over_it_starts_the_next_one(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = scene.start()
    with monkeypatch.context() as soon:
        soon.setattr("composer_prime.launch.supervisor_job.HANDOVER_S", HOST_TIMEOUT_S)
        assert scene.run(job) == 0
    second = f"{scene.book.name}--{SITE}--2"
    assert scene.said[-1] == f"handed over to {second}" and second in scene.platform.jobs
    scene.platform.ends(job, JobState.SUCCEEDED, 0)
    assert scene.platform.jobs[second][0].secrets.reveal() == scene.platform.jobs[job][0].secrets.reveal()
    scene.end_sites()
    assert scene.run(second) == 0


def test_cancel_ends_it_and_one_that_comes_late_does_not_start(scene: Scene) -> None:
    job, _ = scene.start()
    fleet = Fleet(open_launch(open_store(scene.plan.run_uri)), opener=lambda on: scene.platform)
    assert [(seen.site, seen.problem) for seen in fleet.cancel()] == [(SITE, "")]
    assert scene.platform.cancelled == [job]
    with pytest.raises(BadInput, match=r"was stopped on .*: it doesn't start"):
        scene.run(job)


def test_neither_the_bucket_nor_the_command_line_holds_a_secret(scene: Scene) -> None:
    job, _ = scene.start()
    store = open_store(scene.plan.run_uri)
    assert not [key for key in store.list("") for value in (SECRET, TOKEN) if value.encode() in store.get(key)]
    spec, _ = scene.platform.jobs[job]
    assert not [word for word in spec.command if SECRET in word or TOKEN in word]
    assert spec.secrets.reveal() == {"HF_TOKEN": SECRET, LOGIN_PREFIX + "MOON_TOKEN": TOKEN}
    assert spec.env["COMPOSER_PRIME_SECRETS"] == f"{LOGIN_PREFIX}MOON_TOKEN,HF_TOKEN"


def test_an_order_that_was_exchanged_in_the_bucket_is_not_followed(scene: Scene) -> None:
    job, _ = scene.start()
    store = open_store(scene.plan.run_uri)
    key = launch_keys.order(scene.platform.jobs[job][0].command[-1])
    theirs = store.get(key).replace(b'"any"', b'"evil"')
    store.delete(key)
    store.create(key, theirs)
    with pytest.raises(CorruptObject, match="is not what was launched: its sha256 differs"):
        scene.run(job)


@pytest.mark.parametrize(
    ("sites", "on", "said"),
    [
        ("local", "modal", "local are processes of this machine, and can't be watched from another"),
        ("ssh:gpu1", "modal", "jobs on ssh:gpu1 can't be watched from another machine"),
        ("modal", "local", "can't be watched from another"),
        ("modal", "moon", "'moon' is no platform"),
    ],
)
def test_what_can_not_be_watched_from_elsewhere_is_refused(
    sites: str, on: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-x")
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-x")
    pytest.importorskip("modal")
    plan = plan_launch(small_recipe(launch={"image": "any"}), sites, environment={}, replicas=1)
    with pytest.raises(BadInput, match=said):
        order_of(plan, on, LIMITS, 1.0)


def test_a_site_of_its_name_is_refused() -> None:
    plan = plan_launch(small_recipe(launch={"image": "any"}), "modal", environment={}, sites=(SITE,))
    with pytest.raises(BadInput, match="site supervisor has the name of the job"):
        order_of(plan, "modal", LIMITS, 1.0)
