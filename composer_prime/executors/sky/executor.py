"""Sites as SkyPilot's managed jobs: on its clouds, Kubernetes, Slurm and machines of one's own, recovered by itself.

A job that loses its machine is started again elsewhere by SkyPilot, as the same job and attempt, and goes on from the
bucket.
"""

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import Job, JobSpec, Price, hides_secrets, parse_name
from composer_prime.executors.sky import offers, task
from composer_prime.executors.sky.api import SkyApi
from composer_prime.executors.sky.logs import Given
from composer_prime.executors.unique_jobs import JobReport, UniqueJobs

PLATFORM = "sky"


class SkyExecutor(UniqueJobs):
    """The `Executor` for SkyPilot.

    endpoint, token   of the API server; None: as SkyPilot's own client takes them from the environment
    resources         SkyPilot's `resources` for all jobs; None: the JSON of COMPOSER_PRIME_SKY_RESOURCES
    """

    platform = PLATFORM
    confirm_s = 600.0  # its machines are terminated first

    def __init__(
        self, endpoint: str | None = None, token: str | None = None, resources: Mapping[str, Any] | None = None
    ) -> None:
        self._api = SkyApi(endpoint, token)
        self._resources = _given_resources() if resources is None else dict(resources)

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        """Refuse what SkyPilot would refuse, now or once it has taken the job; of accelerators, if it answers."""
        task.check_task(spec)
        task.resources_of(spec, self._resources)
        if (listed := self._listed_now(spec)) is not None:
            offers.matching(listed, spec.resources)

    def log_in(self) -> None:
        """Raise BadInput also for a server that is too old, and for one without a cloud."""
        self._api.check_ready()
        if not self._api.ask("/enabled_clouds"):
            raise BadInput(
                f"SkyPilot ({self._api.shown}) has access to no cloud: set one up and run `sky check` where it runs"
            )

    def credentials(self) -> dict[str, str]:
        return self._api.login_variables()

    def account(self) -> str:
        return self._api.account()

    def describe(self, spec: JobSpec) -> str:
        """The `sky jobs launch` command that would start the same command; its resources stand in a comment."""
        resources = json.dumps(task.resources_of(spec, self._resources))
        options = [
            *(f"--env={name}={value}" for name, value in task.envs_of(spec).items()),
            *(f"--secret={name}" for name in spec.secrets),
        ]
        command = shlex.join(["timeout", str(spec.timeout_s), *spec.command])
        launch = shlex.join(["sky", "jobs", "launch", "--yes", "--name", spec.name, *options, "--", command])
        return spec.secrets.redact(f"{launch}  # at {self._api.shown}, resources {resources}")

    def price(self, spec: JobSpec) -> Price:
        """What the dearest machine costs that SkyPilot may take, by the server's catalog, else by the shipped table."""
        resources = task.resources_of(spec, self._resources)
        return offers.price(self._listed_now(spec), spec.resources, resources, self._api.shown)

    def close(self) -> None:
        """Let go of the connections."""
        self._api.close()

    def _list(self, run: str, site: str | None, attempt: int | None) -> list[JobReport]:
        records = self._queue(name_match=f"{run}--" if site is None else f"{run}--{site}--{attempt}")
        return [report for record in records if task.was_taken(record) and (report := _report_of(record))]

    def _by_id(self, id: str) -> JobReport | None:
        found = self._queue(job_ids=[int(id)]) if id.isdecimal() else []
        return _report_of(found[0]) if found else None

    def _queue(self, **which: Any) -> list[Mapping[str, Any]]:
        """Records of this user's managed jobs; others may give theirs the same names."""
        return self._api.ask("/jobs/queue/v2", {"fields": list(task.FIELDS), **which})["jobs"]

    def _start(self, spec: JobSpec) -> list[JobReport]:
        body = {"task": task.task_of(spec, task.resources_of(spec, self._resources), time.time()), "name": spec.name}
        try:
            self._api.launch(body, lambda: self._settle(spec))
        except (BadInput, ExecutorError):
            for left in self._named(spec.run, spec.site, spec.attempt):
                if left.status.half_submitted:  # SkyPilot keeps a job whose launch failed as pending for ever
                    self._end(left)
            raise
        return []

    def _ask_end(self, job: Job) -> None:
        self._api.ask("/jobs/cancel", {"job_ids": [int(job.id)]})

    def _log_reader(self, job: Job, to_end: bool) -> Callable[[], Iterator[str]]:
        given = Given()
        return lambda: given.new_lines(self._api.log(int(job.id), follow=to_end))

    def _listed_now(self, spec: JobSpec) -> offers.Listed | None:
        """The accelerators of all clouds and regions; None where none are wanted, or the server tells of none."""
        if spec.resources.gpu:
            with suppress(ExecutorError, BadInput):
                self._api.health()  # one try, lest a dry run without a server waits
                if clouds := self._api.ask("/enabled_clouds"):
                    body = {"clouds": clouds, "require_price": False, "all_regions": True}
                    return self._api.ask("/list_accelerators", body)
        return None


def _report_of(record: Mapping[str, Any]) -> JobReport | None:
    """A job by the managed job's record, of two of a name the one with the lower number first; None: it isn't ours."""
    if (name := parse_name(record["job_name"])) is None:
        return None
    number = record["job_id"]
    return JobReport(
        Job(PLATFORM, str(number), *name), task.status_of(record), number, "`sky jobs queue` and `sky status`"
    )


def _given_resources() -> dict[str, Any]:
    text = os.environ.get(task.RESOURCES_VARIABLE) or "{}"
    with suppress(ValueError):
        if isinstance(given := json.loads(text), dict):
            return given
    raise BadInput(
        f"{task.RESOURCES_VARIABLE} ({text}) must be SkyPilot's resources as a JSON object: "
        """write '{"use_spot": true, "infra": "aws/us-east-1"}'"""
    )
