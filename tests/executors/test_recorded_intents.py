"""Intents in the bucket that have no job yet: a killed launcher's are made good, others are refused before they run."""

from dataclasses import replace

import pytest

from composer_prime.errors import BadInput
from composer_prime.executors.base import JobState, JobStatus
from composer_prime.launch import launch_keys
from tests.executors.launches import Scene, meant, running, small_plan


def test_an_intent_that_is_not_as_planned_is_refused_and_those_that_were_made_good_are_ended_again() -> None:
    scene = Scene(plan=small_plan(sites=("b",), launch={"image": "theirs"}))
    meant(scene)
    scene.plan = small_plan(sites=("a",))
    meant(scene)
    scene.plan = small_plan()
    fleet = scene.fleet()
    with pytest.raises(BadInput, match=r"sites/b/0001/intent.json is of another job than this launch plans"):
        scene.supervisor(fleet).turn()
    assert [(seen.place, seen.state) for seen in fleet.withdraw()] == [(("a", 1), "withdrawn")]
    assert running(scene) == []


def test_a_shorter_time_of_an_intent_is_kept_since_the_budget_had_less_left() -> None:
    scene = Scene()
    meant(scene)
    scene.supervisor().turn()
    assert [spec.timeout_s for spec, _ in scene.platform.jobs.values()] == [600, 600]


def test_a_launch_with_a_changed_recipe_watches_the_jobs_there_are_and_restarts_with_its_own() -> None:
    scene = Scene(plan=small_plan(sites=("a",), launch={"image": "first"}))
    scene.supervisor().turn()
    scene.store.delete(launch_keys.job(1, "a", 1))  # its launcher was killed before it wrote the job down
    scene.plan = small_plan(sites=("a",), launch={"image": "second"})
    supervisor = scene.supervisor()
    supervisor.turn()
    assert running(scene) == ["a1"] and scene.book().attempts("a")[0].job is not None
    scene.platform.ends(scene.job_id("a", 1), JobState.PREEMPTED)
    supervisor.turn()
    spec, _ = scene.platform.jobs[scene.job_id("a", 2)]
    assert running(scene) == ["a2"] and spec.image == "second"


def test_an_intent_that_turns_up_while_a_launch_is_watched_gives_its_site_up_and_no_other() -> None:
    scene = Scene()
    supervisor = scene.supervisor()
    supervisor.turn()
    fleet = scene.fleet()
    theirs = replace(fleet.spec(scene.plan, "a", 2), command=("touch", "planted"))
    fleet.intend("local", theirs, fleet.price(scene.plan, theirs), 600)
    scene.platform.ends(scene.job_id("b", 1), JobState.PREEMPTED)
    supervisor.turn()
    assert running(scene) == ["a1", "b2"]
    assert any("a: given up: refused: launches/0001/sites/a/0002" in line for line in scene.said)


def test_a_half_submitted_job_of_an_intent_that_is_not_as_planned_is_not_submitted_again() -> None:
    scene = Scene(plan=small_plan(sites=("a",), launch={"image": "theirs"}))
    scene.supervisor().turn()
    job_id = scene.job_id("a", 1)
    scene.platform.jobs[job_id] = (scene.platform.jobs[job_id][0], JobStatus(JobState.PENDING, half_submitted=True))
    scene.plan = small_plan(sites=("a",))
    scene.platform.on_submit.append(lambda: pytest.fail("submitted"))
    with pytest.raises(BadInput, match="of another job than this launch plans"):
        scene.supervisor().turn()
