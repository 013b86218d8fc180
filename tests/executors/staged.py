"""A launch on a loopback platform whose sites run a test's program: the real fleet and supervisor, no training."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from composer_prime.executors.base import Executor, JobSpec
from composer_prime.executors.open import open_executor
from composer_prime.launch.budget import Limits
from composer_prime.launch.fleet import Fleet
from composer_prime.launch.plan import LaunchPlan
from composer_prime.launch.records import LaunchBook, begin_launch
from composer_prime.launch.supervisor import Supervisor
from composer_prime.store import open_store
from composer_prime.sync.canonical import sha256_hex
from tests.executors.jobs import PREAMBLE
from tests.executors.launches import small_plan

LIMITS = Limits(max_restarts=99, hang_after_s=None)


class StagedFleet(Fleet):
    """Its jobs run `program` with the site's name and the attempt's number as arguments 2 and 3."""

    def __init__(self, folder: Path, program: str, opener: Callable[[str], Executor] = open_executor) -> None:
        super().__init__(staged_book(folder), opener=opener)
        self._folder = folder
        self._program = folder / f"{sha256_hex(program.encode())[:16]}.py"
        self._program.write_text(PREAMBLE + program)

    def spec(self, plan: LaunchPlan, site: str, attempt: int) -> JobSpec:
        command = (sys.executable, str(self._program), str(self._folder), site, str(attempt))
        return replace(super().spec(plan, site, attempt), command=command)


def staged_book(folder: Path) -> LaunchBook:
    """The newest launch that was recorded in a stage's folder, or a new one."""
    run = folder.parent.name.replace("_", "-")
    return begin_launch(open_store(str(folder / "bucket" / run)), run)


def staged_plan(option: str, *sites: str, timeout_s: int = 600, usd_per_hour: float | None = None) -> LaunchPlan:
    """A plan for small machines of the platform that `--on option` names."""
    machine = {"image": "any", "cpus": 1, "memory_gib": 1, "timeout_hours": timeout_s / 3600}
    plan = small_plan(option, launch=machine, usd_per_hour=usd_per_hour)
    return replace(plan, places=dict.fromkeys(sites, option))


def supervise_forever(executor: Executor, option: str, folder: str, program: str, *sites: str) -> None:
    """What a launcher does that a test kills: says ready, waits for a line, and looks again and again."""
    fleet = StagedFleet(Path(folder), program, lambda on: executor)
    supervisor = Supervisor(fleet, staged_plan(option, *sites), LIMITS, say=lambda line: None)
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        supervisor.turn()
