"""`cancel` asks for the end of all jobs at once, and no job's trouble is another's; what is refused is given up."""

import threading
from dataclasses import dataclass, field, replace

import pytest

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import Job, JobState, JobStatus
from composer_prime.executors.budget import Limits
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
    problems = {seen.attempt.site: problem for seen, problem in scene.fleet().cancel()}
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
    looked = {seen.attempt.site: (seen.state, seen.problem) for seen in scene.fleet().look()}
    assert looked == {"a": ("unknown", "KeyError: 'stage'"), "b": ("running", "")}
    assert [problem for _, problem in scene.fleet().cancel()] == ["", ""] and running(scene) == []


def test_a_job_that_the_platform_refuses_to_end_is_given_up_and_said_to_be_billed() -> None:
    platform = Odd()
    scene = Scene(platform=platform, limits=Limits(max_restarts=2, hang_after_s=10.0))
    supervisor = scene.supervisor()
    for _ in range(2):  # the second one sees the jobs running
        supervisor.turn()
    platform.ended = BadInput("this token may not do that")
    scene.ticks += 1000
    for _ in range(2):
        assert supervisor.turn() is False
    scene.platform.ends(scene.job_id("b", 2), JobState.SUCCEEDED, 0)
    asked = len(scene.said)
    assert supervisor.run(lambda: None) is False
    (said,) = [line for line in scene.said if line.startswith("a: given up")]
    assert "attempt 1 may still run and be billed: this token may not do that" in said
    assert running(scene) == ["a1"] and len(scene.said) <= asked + 2


def test_a_job_that_the_platform_refuses_to_show_is_given_up_and_the_others_are_watched_to_their_end() -> None:
    platform = Odd()
    scene = Scene(platform=platform)
    supervisor = scene.supervisor()
    supervisor.turn()
    platform.polled = BadInput("Modal refuses the token")
    assert supervisor.turn() is False
    (said,) = [line for line in scene.said if line.startswith("a: given up")]
    assert "Modal refuses the token" in said and "may still run and be billed" in said
    scene.platform.ends(scene.job_id("b", 1), JobState.SUCCEEDED, 0)
    assert supervisor.run(lambda: None) is False
    with pytest.raises(BadInput, match="refuses the token"):
        replace(scene, said=[]).supervisor().turn()
