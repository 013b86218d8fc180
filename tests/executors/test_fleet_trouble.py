"""A launch where something is in the way: another login, a platform that refuses or fails, a cancel half done."""

import pytest

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import Job, JobSpec, JobState, JobStatus
from composer_prime.launch import launch_keys
from composer_prime.launch.budget import Limits
from composer_prime.launch.fleet import Fleet
from composer_prime.launch.listing import rows
from composer_prime.launch.records import read_order
from composer_prime.store import open_store
from tests.executors.launches import Scene, meant, running, small_plan
from tests.executors.scripted import ScriptedPlatform


def states(scene: Scene) -> dict[tuple[str, int], str]:
    return {seen.place: seen.state for seen in scene.stopped_fleet().look()}


class Stuck(ScriptedPlatform):
    """Confirms no cancel while it is stuck."""

    stuck = True

    def cancel(self, job: Job) -> JobStatus:
        if self.stuck:
            raise ExecutorError("not confirmed in 120 s")
        return super().cancel(job)


class Choosy(ScriptedPlatform):
    """Refuses, or fails, the submit of some attempts."""

    refuses: tuple[str, ...] = ()
    fails: tuple[str, ...] = ()

    def submit(self, spec: JobSpec) -> Job:
        name = f"{spec.site}{spec.attempt}"
        if name in self.refuses or spec.image == "bad/image":
            raise BadInput(f"image {spec.image} can't be pulled")
        if name in self.fails:
            raise ExecutorError(f"no host for {name}")
        return super().submit(spec)


# --- another login ---------------------------------------------------------------------------------------------------


def elsewhere(scene: Scene) -> Fleet:
    """The launch, seen with a login that has none of its jobs."""
    return Fleet(scene.book(), opener=lambda on: ScriptedPlatform())


def test_a_cancel_with_another_login_confirms_nothing_and_the_right_one_still_ends_all() -> None:
    scene = Scene()
    scene.supervisor().turn()
    problems = [each.problem for each in elsewhere(scene).cancel()]
    assert len(problems) == 2 and all("unknown to its platform with this login" in problem for problem in problems)
    assert running(scene) == ["a1", "b1"] and set(states(scene).values()) == {"running"}
    assert [each.problem for each in scene.stopped_fleet().cancel()] == ["", ""]
    assert running(scene) == [] and set(states(scene).values()) == {"cancelled"}


def test_a_supervisor_with_another_login_starts_no_doubles() -> None:
    scene = Scene()
    scene.supervisor().turn()
    other = ScriptedPlatform()
    supervisor = scene.supervisor(Fleet(scene.book(), opener=lambda on: other))
    for _ in range(3):
        assert supervisor.turn() is False
    assert other.jobs == {} and len([line for line in scene.said if "with this login" in line]) == 2


class Killed(BaseException):
    """The launcher's end in the middle of a call."""


def die() -> None:
    raise Killed


class Account(ScriptedPlatform):
    """Says whose jobs it sees."""

    name = "me"

    def account(self) -> str:
        return self.name


def killed_before_it_wrote_the_job_down(platform: ScriptedPlatform) -> Scene:
    scene = Scene(platform=platform, plan=small_plan(sites=("a",)))
    platform.on_submit = [die]
    with pytest.raises(Killed):
        scene.supervisor().turn()
    platform.on_submit = []
    assert running(scene) == ["a1"] and scene.book().attempts("a")[0].job is None
    return scene


def test_a_job_that_was_never_written_down_is_ended_from_where_it_was_launched() -> None:
    scene = killed_before_it_wrote_the_job_down(ScriptedPlatform())
    assert [each.problem for each in scene.stopped_fleet().cancel()] == [""]
    assert running(scene) == [] and states(scene) == {("a", 1): "cancelled"}


def test_from_another_machine_a_login_that_sees_no_such_job_confirms_no_end_and_starts_no_double(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = killed_before_it_wrote_the_job_down(ScriptedPlatform())
    with monkeypatch.context() as there:
        there.setattr("socket.gethostname", lambda: "another-machine")
        other = ScriptedPlatform()
        assert scene.supervisor(Fleet(scene.book(), opener=lambda on: other)).turn() is False
        assert other.jobs == {}
        (seen,) = elsewhere(scene).cancel()
        assert "was to be a job of " in seen.problem and "isn't confirmed" in seen.problem
        assert seen.ended is None and seen.state == "unknown"
    assert [each.problem for each in scene.stopped_fleet().cancel()] == [""]
    assert running(scene) == []


def test_from_another_machine_a_login_of_the_same_account_goes_on_where_the_launcher_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = killed_before_it_wrote_the_job_down(Account())
    monkeypatch.setattr("socket.gethostname", lambda: "another-machine")
    scene.platform.jobs.clear()  # it was killed a moment earlier: there is no job
    scene.supervisor().turn()
    assert running(scene) == ["a1"] and states(scene) == {("a", 1): "running"}


def test_on_the_same_machine_a_login_of_another_account_confirms_no_end() -> None:
    scene = killed_before_it_wrote_the_job_down(Account())
    other = Account()
    other.name = "my-company"
    (seen,) = Fleet(scene.book(), opener=lambda on: other).cancel()
    assert "was to be a job of me" in seen.problem and running(scene) == ["a1"]


def test_a_lost_attempt_that_is_there_after_all_is_ended_before_the_next_and_by_cancel() -> None:
    scene = Scene(plan=small_plan(sites=("a",)))
    scene.supervisor().turn()
    job_id = scene.job_id("a", 1)
    hidden = scene.platform.jobs.pop(job_id)
    scene.later_s = scene.plan.timeout_s + 1
    fleet = scene.fleet()
    (lost,) = (fleet.settle(seen) for seen in fleet.look())
    assert lost.ended is not None and lost.may_run
    scene.platform.jobs[job_id] = hidden
    scene.supervisor().turn()
    assert running(scene) == ["a2"] and scene.platform.cancelled == [job_id]
    assert [each.problem for each in scene.fleet().cancel()] == ["", ""] and running(scene) == []


def test_cancel_of_a_job_that_nobody_knows_is_confirmed_once_its_time_has_passed() -> None:
    scene = Scene()
    scene.supervisor().turn()
    scene.platform.jobs.clear()
    assert all(each.problem for each in scene.fleet().cancel())
    scene.later_s = scene.plan.timeout_s + 1
    assert [each.problem for each in scene.stopped_fleet().cancel()] == ["", ""]
    assert set(states(scene).values()) == {"lost"}


# --- a cancel half done ----------------------------------------------------------------------------------------------


def test_no_new_launch_begins_while_jobs_of_the_stopped_one_may_run() -> None:
    platform = Stuck()
    scene = Scene(platform=platform)
    scene.supervisor().turn()
    assert all(each.problem for each in scene.fleet().cancel())
    with pytest.raises(BadInput, match=r"a attempt 1 \(not confirmed in 120 s\); b attempt 1 .*composer-prime cancel"):
        scene.begin()
    assert scene.store.list(launch_keys.launch(2)) == []
    platform.stuck = False
    assert scene.begin().book.launch.number == 2
    assert running(scene) == [], "jobs of the first launch run beside the second"


def test_a_replica_runs_what_its_own_launch_says_and_nothing_once_that_was_stopped(tmp_path) -> None:
    store = open_store(str(tmp_path / "runs" / "small"))
    scene = Scene(store=store)
    scene.supervisor().turn()
    spec, _ = scene.platform.jobs[scene.job_id("a", 1)]
    assert spec.command[spec.command.index("--launch") + 1] == "1"
    sha = spec.command[spec.command.index("--recipe") + 1]
    list(scene.fleet().cancel("b"))
    with pytest.raises(BadInput, match=r"site b was stopped on .*doesn't start"):
        read_order(store.uri, 1, "b", 1, sha)
    list(scene.fleet().cancel())
    scene.supervisor(scene.begin()).turn()
    with pytest.raises(BadInput, match=r"was stopped on .*doesn't start"):
        read_order(store.uri, 1, "a", 1, sha)
    with pytest.raises(BadInput, match="no launch 3"):
        read_order(store.uri, 3, "a", 1, sha)
    with pytest.raises(BadInput, match="the recipe launched"):
        read_order(store.uri, 2, "a", 1, sha)  # it got as far as the recipe, which is of s3://bucket


def test_a_replica_whose_attempt_was_given_up_does_not_start(tmp_path) -> None:
    store = open_store(str(tmp_path / "small"))
    scene = Scene(store=store)
    scene.supervisor().turn()
    seen, _ = scene.fleet().look()
    scene.fleet().book.stop(*seen.place, "hung", "no beat")
    with pytest.raises(BadInput, match=r"attempt 1 of site a was stopped on .*: it doesn't start"):
        read_order(store.uri, 1, "a", 1, "0" * 64)


def test_a_stopped_site_between_two_attempts_is_not_started_again() -> None:
    scene = Scene()
    supervisor = scene.supervisor()
    supervisor.turn()
    scene.platform.ends(scene.job_id("a", 1), JobState.PREEMPTED)
    assert [each.problem for each in scene.fleet().cancel("a")] == [""]
    for each in (supervisor, scene.supervisor()):
        each.turn()
        assert running(scene) == ["b1"]
    assert any("a: given up: cancelled" in line for line in scene.said)


def test_a_job_started_while_its_site_is_stopped_is_ended_by_who_started_it() -> None:
    scene = Scene()
    scene.platform.on_submit.append(lambda: scene.book().stop("a"))
    supervisor = scene.supervisor()
    supervisor.turn()
    supervisor.turn()
    assert running(scene) == ["b1"] and states(scene)["a", 1] == "cancelled"


def test_a_site_that_was_stopped_before_it_had_an_attempt_is_left_and_the_others_are_watched() -> None:
    scene = Scene()
    scene.book().stop("a")
    supervisor = scene.supervisor()
    supervisor.turn()
    assert running(scene) == ["b1"] and "a: given up: cancelled" in scene.said
    scene.platform.ends(scene.job_id("b", 1), JobState.SUCCEEDED, 0)
    assert supervisor.turn() is True


def test_cancel_of_a_site_that_is_not_there_names_those_that_are() -> None:
    scene = Scene()
    scene.supervisor().turn()
    with pytest.raises(BadInput, match="no site typo: it has a, b"):
        list(scene.fleet().cancel("typo"))
    assert running(scene) == ["a1", "b1"] and scene.book().stopped("typo") is None


# --- one site's trouble ----------------------------------------------------------------------------------------------


def test_one_sites_trouble_does_not_hold_up_the_others() -> None:
    platform = Choosy()
    scene = Scene(platform=platform)
    supervisor = scene.supervisor()
    supervisor.turn()
    for site in "ab":
        scene.platform.ends(scene.job_id(site, 1), JobState.PREEMPTED)
    platform.fails = ("a2",)
    for _ in range(3):
        assert supervisor.turn() is False
    assert running(scene) == ["b2"] and supervisor.troubled == {"a": "no host for a2"}
    assert len([line for line in scene.said if "no host for a2" in line]) == 1
    platform.fails = ()
    supervisor.turn()
    assert running(scene) == ["a2", "b2"] and supervisor.troubled == {}


def test_a_restart_that_is_refused_gives_up_its_site_and_watches_the_others_to_their_end() -> None:
    platform = Choosy()
    scene = Scene(platform=platform)
    supervisor = scene.supervisor()
    supervisor.turn()
    scene.platform.ends(scene.job_id("a", 1), JobState.PREEMPTED)
    platform.refuses = ("a2",)
    assert supervisor.turn() is False
    assert any("a: given up: refused: image" in line for line in scene.said)
    scene.platform.ends(scene.job_id("b", 1), JobState.SUCCEEDED, 0)
    assert supervisor.run(lambda: None) is False


def test_a_launch_that_can_not_start_all_its_sites_ends_those_it_started_and_the_corrected_one_starts_all() -> None:
    platform = Choosy(usd_per_hour=1.0)
    platform.refuses = ("b1",)
    scene = Scene(platform=platform)
    fleet = scene.fleet()
    with pytest.raises(BadInput, match="can't be pulled"):
        scene.supervisor(fleet).turn()
    assert running(scene) == ["a1"]
    assert [(seen.place, seen.state, seen.problem) for seen in fleet.withdraw()] == [(("a", 1), "withdrawn", "")]
    assert running(scene) == [] and states(scene) == {("a", 1): "withdrawn", ("b", 1): "refused"}
    scene.limits = Limits(max_restarts=0)
    scene.supervisor().turn()
    assert running(scene) == ["a2", "b2"]


def test_a_withdrawal_leaves_what_earlier_commands_started() -> None:
    platform = Choosy()
    scene = Scene(platform=platform, plan=small_plan(sites=("a",)))
    scene.supervisor().turn()
    scene.plan = small_plan(sites=("a", "b", "c"))
    platform.refuses = ("c1",)
    fleet = scene.fleet()
    with pytest.raises(BadInput):
        scene.supervisor(fleet).turn()
    assert [seen.place for seen in fleet.withdraw()] == [("b", 1)] and running(scene) == ["a1"]


def test_what_the_platform_refused_is_no_mistake_of_the_corrected_command() -> None:
    scene = Scene(platform=Choosy(), plan=small_plan(sites=("a",), launch={"image": "bad/image"}))
    for _ in range(2):
        with pytest.raises(BadInput, match="bad/image"):
            scene.supervisor().turn()
    (row, _) = rows(scene.fleet().look())
    assert (row.state, row.seconds, row.usd) == ("refused", 0.0, 0.0) and "can't be pulled" in row.message
    scene.plan = small_plan(sites=("a",), launch={"image": "good/image"})
    scene.supervisor().turn()
    assert running(scene) == ["a3"]


def test_an_intent_left_by_a_killed_launcher_that_the_platform_refuses_is_followed_by_the_corrected_one() -> None:
    scene = Scene(platform=Choosy(), plan=small_plan(sites=("a",), launch={"image": "bad/image"}))
    meant(scene)
    with pytest.raises(BadInput, match="can't be pulled"):
        scene.supervisor().turn()
    scene.plan = small_plan(sites=("a",), launch={"image": "good/image"})
    scene.supervisor().turn()
    assert running(scene) == ["a2"] and states(scene)["a", 1] == "refused"


def test_a_job_that_the_platform_has_is_never_written_down_as_refused() -> None:
    platform = Choosy()
    scene = Scene(platform=platform, plan=small_plan(sites=("a",)))
    scene.supervisor().turn()
    platform.refuses = ("a1",)  # a login that has run out, say
    with pytest.raises(BadInput):  # as of a launcher whose look was before that job
        scene.fleet().start(scene.plan, "a", 1, 600)
    assert states(scene) == {("a", 1): "running"}


# --- money -----------------------------------------------------------------------------------------------------------


def most_usd(scene: Scene) -> float:
    """What all jobs that were ever started can cost, by their time-outs."""
    hours = sum(spec.timeout_s for spec, _ in scene.platform.jobs.values()) / 3600
    return hours * (scene.platform.usd_per_hour or 0.0)


def test_launch_commands_for_other_sites_share_one_limit() -> None:
    scene = Scene(limits=Limits(max_usd=1.0), platform=ScriptedPlatform(usd_per_hour=2.0))
    for site in "abc":
        scene.plan = small_plan(sites=(site,))
        supervisor = scene.supervisor()
        supervisor.check()
        supervisor.turn()
    assert most_usd(scene) <= 1.0 and running(scene) == ["a1"]


def test_lost_attempts_cost_all_their_time() -> None:
    platform = ScriptedPlatform(usd_per_hour=2.0)
    scene = Scene(limits=Limits(max_restarts=9, max_usd=1.0), platform=platform, plan=small_plan(sites=("a",)))
    supervisor, spent = scene.supervisor(), 0.0
    supervisor.check()
    for _ in range(5):
        supervisor.turn()
        spent += most_usd(scene)
        platform.jobs.clear()
        scene.later_s += 24 * 3600
    assert spent <= 1.0
    assert sum(row.usd or 0 for row in rows(scene.book().attempts())) == pytest.approx(1.0)


def test_a_hanging_job_is_paid_until_its_end_is_confirmed() -> None:
    platform = Stuck(usd_per_hour=2.0)
    limits = Limits(max_restarts=9, max_usd=2.0, hang_after_s=1.0)
    scene = Scene(platform=platform, plan=small_plan(sites=("a",)), limits=limits)
    supervisor = scene.supervisor()
    supervisor.check()
    supervisor.turn()
    supervisor.turn()
    scene.ticks = 10.0
    supervisor.turn()
    assert running(scene) == ["a1"] and "may still run and be billed" in scene.said[-1]
    scene.later_s = 1800
    (row,) = rows(scene.fleet().look(), scene.fleet().clock())
    assert row.state == "running" and row.usd == pytest.approx(1.0, rel=0.01)
    platform.stuck = False
    supervisor.turn()
    supervisor.turn()
    assert running(scene) == ["a2"] and states(scene)["a", 1] == "hung"


# --- half submitted --------------------------------------------------------------------------------------------------


def test_a_job_that_was_only_half_submitted_is_submitted_again() -> None:
    scene = Scene(plan=small_plan(sites=("a",)))
    scene.supervisor().turn()
    job_id = scene.job_id("a", 1)
    submitted: list[str] = []
    scene.platform.jobs[job_id] = (scene.platform.jobs[job_id][0], JobStatus(JobState.PENDING, half_submitted=True))
    scene.platform.on_submit.append(lambda: submitted.append("again"))
    scene.supervisor().turn()
    assert submitted == ["again"] and list(scene.platform.jobs) == [job_id]
