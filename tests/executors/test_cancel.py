"""`cancel` asks for the end of all jobs at once, and no job's trouble is another's; what is refused is given up."""

import threading
from dataclasses import dataclass, field

import pytest

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import Job, JobState, JobStatus
from composer_prime.launch.budget import Limits
from composer_prime.launch.supervisor import REFUSAL_PATIENCE_S, Supervisor
from tests.executors.launches import Scene, running, small_plan
from tests.executors.scripted import ScriptedPlatform

NUM_JOBS = 64
FAILURES = [
    ExecutorError("not confirmed in 120 s"),
    BadInput("this token may not do that"),
    KeyError("status"),
    OSError("reset"),
]


@dataclass
class Meeting(ScriptedPlatform):
    """Answers no cancel before it was asked for all; site r0's request fails then, with `failure`."""

    failure: Exception = field(default_factory=lambda: ExecutorError("?"))
    all_asked: threading.Barrier = field(default_factory=lambda: threading.Barrier(NUM_JOBS))

    def cancel(self, job: Job) -> JobStatus:
        self.all_asked.wait(timeout=600)
        if job.site == "r0":
            raise self.failure
        return super().cancel(job)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_all_jobs_are_asked_to_end_before_one_has_and_one_that_fails_is_told_apart(failure: Exception) -> None:
    scene = Scene(platform=Meeting(failure=failure), plan=small_plan(replicas=NUM_JOBS))
    scene.supervisor().turn()
    problems = {seen.site: seen.problem for seen in scene.fleet().cancel()}
    assert len(problems) == NUM_JOBS and str(failure) in problems.pop("r0")
    assert set(problems.values()) == {""}
    assert running(scene) == ["r01"]


@dataclass
class Odd(ScriptedPlatform):
    """Answers some requests about site a's job with something unforeseen, or with a refusal."""

    polled: Exception | None = None
    ended: Exception | None = None

    def poll(self, job: Job) -> JobStatus:
        if self.polled is not None and job.site == "a":
            raise self.polled
        return super().poll(job)

    def cancel(self, job: Job) -> JobStatus:
        if self.ended is not None and job.site == "a":
            raise self.ended
        return super().cancel(job)


def test_an_answer_that_nobody_foresaw_hides_no_other_job_and_keeps_none_from_its_end() -> None:
    platform = Odd()
    scene = Scene(platform=platform)
    scene.supervisor().turn()
    platform.polled = KeyError("stage")
    looked = {seen.site: (seen.state, seen.problem) for seen in scene.fleet().look()}
    assert looked == {"a": ("unknown", "KeyError: 'stage'"), "b": ("running", "")}
    assert [seen.problem for seen in scene.fleet().cancel()] == ["", ""] and running(scene) == []


def watched(platform: Odd) -> tuple[Scene, Supervisor]:
    """A launch whose jobs were seen running, and are taken for hanging after a while."""
    scene = Scene(platform=platform, limits=Limits(max_restarts=2, hang_after_s=10.0))
    supervisor = scene.supervisor()
    for _ in range(2):  # the second one sees the jobs running
        supervisor.turn()
    return scene, supervisor


def refuse(scene: Scene, supervisor: Supervisor, seconds: float) -> None:
    """Turns over so long a time, each of which leaves something to do."""
    for passed_s in (0.0, seconds / 2, seconds / 2):
        scene.ticks += passed_s
        assert supervisor.turn() is False


def test_a_job_that_the_platform_refuses_to_end_is_given_up_after_a_while_and_said_to_be_billed() -> None:
    platform = Odd()
    scene, supervisor = watched(platform)
    platform.ends(scene.job_id("b", 1), JobState.SUCCEEDED, 0)
    platform.ended = BadInput("this token may not do that")
    scene.ticks += 1000
    supervisor.turn()
    assert running(scene) == ["a1"] and "may still run and be billed" in supervisor.troubled["a"]
    refuse(scene, supervisor, REFUSAL_PATIENCE_S - 1)
    scene.ticks += 2
    assert supervisor.run(lambda: None) is False
    (said,) = [line for line in scene.said if line.startswith("a: given up")]
    assert "refused for 10 minutes to end attempt 1, which may still run and be billed" in said


def test_a_job_that_the_platform_refuses_to_show_is_given_up_after_a_while_and_the_others_are_watched() -> None:
    platform = Odd()
    scene = Scene(platform=platform)
    supervisor = scene.supervisor()
    supervisor.turn()
    platform.polled = BadInput("Modal refuses the token")
    refuse(scene, supervisor, REFUSAL_PATIENCE_S - 1)
    scene.ticks += 2
    supervisor.turn()
    (said,) = [line for line in scene.said if line.startswith("a: given up")]
    assert "refused for 10 minutes to show attempt 1, which may still run and be billed" in said
    platform.ends(scene.job_id("b", 1), JobState.SUCCEEDED, 0)
    assert supervisor.run(lambda: None) is False


def test_a_refusal_that_passes_changes_nothing() -> None:
    platform = Odd()
    scene, supervisor = watched(platform)
    platform.polled = BadInput("Modal refuses the token")
    assert supervisor.turn() is False
    assert "a: no answer, trying again: Modal refuses the token" in scene.said
    platform.polled = None
    assert supervisor.turn() is False and running(scene) == ["a1", "b1"]
    scene.ticks += 1000  # and what hangs then is ended and started again
    for _ in range(2):
        assert supervisor.turn() is False
    assert running(scene) == ["a2", "b2"]
    platform.ends(scene.job_id("a", 2), JobState.PREEMPTED)
    assert supervisor.turn() is False and running(scene) == ["a3", "b2"]
