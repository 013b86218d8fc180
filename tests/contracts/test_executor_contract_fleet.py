"""What a launch promises on every platform: its cost stays in its limit, what hangs is started anew, none is doubled.

The fleet, its records and its supervisor are the real ones, over each loopback; only the sites' program is a test's.
"""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_prime.executors.base import Executor, JobState
from composer_prime.launch.budget import Limits
from composer_prime.launch.fleet import Fleet
from composer_prime.launch.listing import rows
from composer_prime.launch.supervisor import Supervisor
from tests.executors import fixtures
from tests.executors.jobs import FOREVER, Stage, fresh_process, wait_until
from tests.executors.platforms import LoopbackPlatform
from tests.executors.staged import LIMITS, StagedFleet, staged_plan
from tests.patience import PATIENCE_S

platform, executor, stage = fixtures.platform, fixtures.executor, fixtures.stage
taking, replacing = fixtures.taking, fixtures.replacing

SITES = ("a", "b")
ONE_RUN = "count('starts-' + sys.argv[2]); mark('up-' + sys.argv[2]); wait('go')"
LAUNCHER = """
from tests.executors.staged import supervise_forever
supervise_forever(executor, *sys.argv[1:])
"""


def states(fleet: Fleet) -> dict[tuple[str, int], str]:
    return {seen.place: seen.state for seen in fleet.look()}


def live_pids(platform: LoopbackPlatform, executor: Executor, fleet: Fleet) -> list[int]:
    return [pid for job in executor.find(fleet.book.name) for pid in platform.pids(job)]


@pytest.fixture
def ended(executor: Executor, stage: Stage) -> Iterator[None]:
    """Ends what a failed test left running."""
    yield
    stage.mark("go")
    stage.mark("never")


def test_a_launch_whose_jobs_run_out_of_their_time_ends_within_its_cost(
    platform: LoopbackPlatform, executor: Executor, stage: Stage, ended: None
) -> None:
    fleet = StagedFleet(stage.folder, FOREVER, lambda on: executor)
    plan = staged_plan(platform.launch_option(), "a", timeout_s=2, usd_per_hour=3600.0)
    overrun_s = fleet.price(plan, fleet.spec(plan, "a", 1)).overrun_s
    assert overrun_s >= 1, "no time to end"
    said: list[str] = []
    limits = Limits(max_restarts=99, max_usd=overrun_s + 4.0, hang_after_s=None)
    supervisor = Supervisor(fleet, plan, limits, say=said.append)
    supervisor.check()
    assert supervisor.run(lambda: None) is False
    assert any("given up" in line and "budget" in line for line in said), said
    assert states(fleet) == {("a", 1): "timed-out"}
    wait_until(lambda: live_pids(platform, executor, fleet) == [], "no process left")
    (row,) = rows(fleet.look())
    assert row.usd is not None and limits.max_usd is not None and 1.0 < row.usd <= limits.max_usd


def test_a_preempted_replica_is_started_again_as_often_as_it_may_be(
    taking: LoopbackPlatform, executor: Executor, stage: Stage, ended: None
) -> None:
    fleet = StagedFleet(stage.folder, f"mark('up' + sys.argv[3]); {FOREVER}", lambda on: executor)
    said: list[str] = []
    limits = Limits(max_restarts=0, max_preemptions=1, hang_after_s=None)
    supervisor = Supervisor(fleet, staged_plan(taking.launch_option(), "a"), limits, say=said.append)
    supervisor.turn()
    stage.await_mark("up1")
    taking.preempt(executor.find(fleet.book.name)[0])
    wait_until(lambda: not supervisor.turn() and ("a", 2) in states(fleet), "attempt 2 submitted")
    assert states(fleet)["a", 1] == "preempted"
    stage.await_mark("up2")
    taking.preempt(executor.find(fleet.book.name)[1])
    wait_until(supervisor.turn, "given up")
    assert states(fleet) == {("a", 1): "preempted", ("a", 2): "preempted"}
    assert said[-1].startswith("a: given up:") and "--max-preemptions (1) is used up" in said[-1]
    wait_until(lambda: live_pids(taking, executor, fleet) == [], "no process left")


def test_a_replica_whose_machine_is_replaced_stays_its_attempt(
    replacing: LoopbackPlatform, executor: Executor, stage: Stage, ended: None
) -> None:
    fleet = StagedFleet(stage.folder, ONE_RUN, lambda on: executor)
    limits = Limits(max_restarts=0, max_preemptions=0, hang_after_s=None)
    supervisor = Supervisor(fleet, staged_plan(replacing.launch_option(), "a"), limits, say=print)
    supervisor.turn()
    stage.await_mark("up-a")
    replacing.preempt(executor.find(fleet.book.name)[0])
    supervisor.turn()
    wait_until(lambda: stage.counted("starts-a") == 2, "started again")
    assert set(states(fleet)) == {("a", 1)}
    stage.mark("go")
    assert supervisor.run(lambda: None) is True
    assert states(fleet) == {("a", 1): "succeeded"}


def test_a_replica_that_ran_out_of_its_time_is_started_again_as_often_as_it_may_be(
    platform: LoopbackPlatform, executor: Executor, stage: Stage, ended: None
) -> None:
    fleet = StagedFleet(stage.folder, FOREVER, lambda on: executor)
    said: list[str] = []
    limits = Limits(max_restarts=0, max_timeouts=1, hang_after_s=None)
    supervisor = Supervisor(fleet, staged_plan(platform.launch_option(), "a", timeout_s=1), limits, say=said.append)
    wait_until(supervisor.turn, "given up")
    assert states(fleet) == {("a", 1): "timed-out", ("a", 2): "timed-out"}
    assert said[-1].startswith("a: given up:") and "--max-timeouts (1) is used up" in said[-1]
    wait_until(lambda: live_pids(platform, executor, fleet) == [], "no process left")


def test_a_replica_that_hangs_is_ended_and_started_anew(
    platform: LoopbackPlatform, executor: Executor, stage: Stage, ended: None
) -> None:
    program = f"mark('up' + sys.argv[3]); {FOREVER} if sys.argv[3] == '1' else wait('go')"
    fleet = StagedFleet(stage.folder, program, lambda on: executor)
    ticks = [0.0]
    limits = Limits(max_restarts=1, hang_after_s=1.0)
    plan = staged_plan(platform.launch_option(), "a")
    supervisor = Supervisor(fleet, plan, limits, say=print, ticks=lambda: ticks[0])
    supervisor.turn()
    stage.await_mark("up1")
    wait_until(lambda: not supervisor.turn() and states(fleet) == {("a", 1): "running"}, "attempt 1 seen running")
    supervisor.turn()
    ticks[0] = 100.0
    wait_until(lambda: not supervisor.turn() and ("a", 2) in states(fleet), "attempt 2 submitted")
    stage.await_mark("up2")
    (first, second) = executor.find(fleet.book.name)
    assert platform.pids(first) == [] and len(platform.pids(second)) >= 1
    assert states(fleet)["a", 1] == "hung"
    stage.mark("go")
    ticks[0] = 101.0
    assert supervisor.run(lambda: None) is True
    assert states(fleet) == {("a", 1): "hung", ("a", 2): "succeeded"}


@pytest.mark.parametrize("seed", range(3))
def test_a_launcher_killed_at_any_moment_leaves_no_orphan_and_no_double_for_the_next(
    platform: LoopbackPlatform, executor: Executor, stage: Stage, ended: None, seed: int
) -> None:
    arguments = (str(stage.folder), ONE_RUN, *SITES)
    with fresh_process(platform.launch_option(), platform.environment(), LAUNCHER, *arguments) as launcher:
        assert launcher.stdin is not None and launcher.stdout is not None and launcher.stderr is not None
        assert launcher.stdout.readline() == "ready\n", launcher.stderr.read()
        timer = threading.Timer(random.Random(seed).uniform(0.0, 0.8), launcher.kill)
        timer.start()
        launcher.stdin.write("go\n")
        launcher.stdin.flush()
        launcher.wait(PATIENCE_S)
        timer.join()
    fleet = StagedFleet(stage.folder, ONE_RUN, lambda on: executor)
    supervisor = Supervisor(fleet, staged_plan(platform.launch_option(), *SITES), LIMITS, say=print)
    supervisor.turn()
    for site in SITES:
        stage.await_mark(f"up-{site}")
    open_jobs = [job.site for job in executor.find(fleet.book.name) if not executor.poll(job).state.final]
    assert open_jobs == list(SITES)
    stage.mark("go")
    assert supervisor.run(lambda: None) is True
    assert states(fleet) == {(site, 1): JobState.SUCCEEDED.value for site in SITES}
    assert [stage.counted(f"starts-{site}") for site in SITES] == [1, 1]
    wait_until(lambda: live_pids(platform, executor, fleet) == [], "no process left")


def test_a_launch_that_is_cancelled_where_nobody_watches_runs_nowhere_and_is_not_started_again(
    platform: LoopbackPlatform, executor: Executor, stage: Stage, ended: None, tmp_path: Path
) -> None:
    fleet = StagedFleet(stage.folder, ONE_RUN, lambda on: executor)
    plan = staged_plan(platform.launch_option(), *SITES)
    supervisor = Supervisor(fleet, plan, LIMITS, say=print)
    supervisor.turn()
    for site in SITES:
        stage.await_mark(f"up-{site}")
    assert [seen.problem for seen in fleet.cancel("a")] == [""]
    for _ in range(2):
        supervisor.turn()
    assert states(fleet)["a", 1] == "cancelled" and ("a", 2) not in states(fleet)
    stage.mark("go")
    assert supervisor.run(lambda: None) is False
    assert states(fleet) == {("a", 1): "cancelled", ("b", 1): "succeeded"}
    wait_until(lambda: live_pids(platform, executor, fleet) == [], "no process left")
