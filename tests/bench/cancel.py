"""How soon `cancel` has the end of all of a launch's jobs confirmed, one of which can't be ended.

    python -m tests.bench.cancel --jobs 64 [local ssh modal sky hf-jobs]

Each job is a real process on the platform's loopback. The platform's client answers all that is asked about the first
job with a KeyError.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from composer_prime.executors.base import Executor, Job, JobStatus
from composer_prime.launch.supervisor import Supervisor
from tests.executors.jobs import Stage
from tests.executors.registry import LOOPBACKS, loopback
from tests.executors.staged import LIMITS, StagedFleet, staged_plan

PROGRAM = """
mark('up-' + sys.argv[2])
while True:
    time.sleep(1)
"""


class OneFails:
    """An executor, but for the requests about one site's job."""

    def __init__(self, executor: Executor, site: str) -> None:
        self._executor = executor
        self._site = site

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def poll(self, job: Job) -> JobStatus:
        self._fail(job)
        return self._executor.poll(job)

    def cancel(self, job: Job) -> JobStatus:
        self._fail(job)
        return self._executor.cancel(job)

    def _fail(self, job: Job) -> None:
        if job.site == self._site:
            raise KeyError("status")


def measure(name: str, folder: Path, num_jobs: int) -> str:
    """A line for one platform."""
    sites = tuple(f"s{number}" for number in range(num_jobs))
    with closing(loopback(name, folder)) as platform, closing(platform.executor()) as executor:
        stage = Stage(folder / "stage", "cancel")
        fleet = StagedFleet(stage.folder, PROGRAM, lambda on: OneFails(executor, sites[0]))  # pyright: ignore[reportArgumentType]
        began = time.time()
        Supervisor(fleet, staged_plan(platform.launch_option(), *sites), LIMITS, say=lambda line: None).turn()
        for site in sites:
            stage.await_mark(f"up-{site}")
        up_s, began = time.time() - began, time.time()
        problems = [seen.problem for seen in fleet.cancel() if seen.problem]
        ended_s = time.time() - began
    return (
        f"{name:8} {num_jobs} jobs up in {up_s:.1f} s; {num_jobs - len(problems)} ends asked for and confirmed within "
        f"{ended_s:.1f} s; not confirmed: {problems}"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m tests.bench.cancel", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("platforms", nargs="*", default=[*LOOPBACKS], metavar="PLATFORM")
    parser.add_argument("--jobs", type=int, default=64)
    args = parser.parse_args(arguments)
    print(f"load average {os.getloadavg()[0]:.1f}")
    for name in args.platforms:
        with tempfile.TemporaryDirectory(prefix="cancel-") as folder:
            print(measure(name, Path(folder), args.jobs), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
