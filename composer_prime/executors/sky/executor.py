"""Sites as SkyPilot's managed jobs: on its clouds, Kubernetes, Slurm and machines of one's own, recovered by itself.

A job that loses its machine is started again elsewhere by SkyPilot, as the same job and attempt, and goes on from the
bucket. Managed jobs may share a name, so the one with the lowest number is the job, and whoever sees another ends it.
"""

import json
import os
import shlex
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors.base import Job, JobSpec, JobState, JobStatus, Price, hides_secrets, parse_name
from composer_prime.executors.sky import logs, offers
from composer_prime.executors.sky.api import SkyApi
from composer_prime.executors.sky.task import (
    FIELDS,
    RESOURCES_VARIABLE,
    check_task,
    envs_of,
    resources_of,
    status_of,
    task_of,
    was_taken,
)

PLATFORM = "sky"
CONFIRM_S = 600.0
"""For so long a cancelled job may go on before that is an error: its machines are terminated first."""


class SkyExecutor:
    """The `Executor` for SkyPilot.

    endpoint, token   of the API server; None: as SkyPilot's own client takes them from the environment
    resources         SkyPilot's `resources` for all jobs; None: the JSON of COMPOSER_PRIME_SKY_RESOURCES
    """

    platform = PLATFORM

    def __init__(
        self, endpoint: str | None = None, token: str | None = None, resources: Mapping[str, Any] | None = None
    ) -> None:
        self._api = SkyApi(endpoint, token)
        self._resources = _given_resources() if resources is None else dict(resources)
        self._lock = threading.Lock()
        self._clouds: list[str] = []

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        """Refuse what SkyPilot would refuse, now or once it has taken the job; of accelerators, if it answers."""
        check_task(spec)
        resources_of(spec, self._resources)
        if (listed := self._listed_now(spec)) is not None:
            offers.matching(listed, spec.resources)

    def log_in(self) -> None:
        """Raise BadInput also for a server that is too old, and for one without a cloud."""
        self._api.check_ready()
        if not self._enabled():
            raise BadInput(
                f"SkyPilot ({self._api.shown}) has access to no cloud: set one up and run `sky check` where it runs"
            )

    def credentials(self) -> dict[str, str]:
        return self._api.login_variables()

    def describe(self, spec: JobSpec) -> str:
        """The `sky jobs launch` command that would start the same command; its resources stand in a comment."""
        check_task(spec)
        resources = resources_of(spec, self._resources)
        options = [
            *(part for name, value in envs_of(spec).items() for part in ("--env", f"{name}={value}")),
            *(part for name in spec.secrets for part in ("--secret", name)),
        ]
        command = shlex.join(["timeout", str(spec.timeout_s), *spec.command])
        launch = shlex.join(["sky", "jobs", "launch", "--yes", "--name", spec.name, *options, "--", command])
        return spec.secrets.redact(f"{launch}  # at {self._api.shown}, resources {json.dumps(resources)}")

    def price(self, spec: JobSpec) -> Price:
        """What the dearest machine costs that SkyPilot may take, by the server's catalog, else by the shipped table."""
        resources = resources_of(spec, self._resources)
        return offers.price(self._listed_now(spec), spec.resources, resources, self._api.shown)

    @hides_secrets
    def submit(self, spec: JobSpec) -> Job:
        """Launch the job, or return the one of its name."""
        self.check(spec)
        self.log_in()
        try:
            if (standing := self._settle(spec.name)) is None:
                standing = self._launched(spec)
        except ExecutorError as error:
            raise type(error)(f"{error}: the job may have been started: launch again, which finds it") from error
        return self._job(standing)

    def account(self) -> str:
        return self._api.account()

    def find(self, run: str) -> list[Job]:
        """The run's jobs by site and attempt."""
        by_place: dict[tuple[str, int], Job] = {}
        for record in self._queue(name_match=f"{run}--"):
            name = parse_name(record["job_name"])
            if name is not None and name[0] == run and was_taken(record):
                by_place.setdefault(name[1:], self._job(record))
        return [job for _, job in sorted(by_place.items())]

    def poll(self, job: Job) -> JobStatus:
        """How the job is now."""
        return status_of(self._inspect(job))

    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        """The job's lines, standard output and error together; of a job that was recovered, the last machine's."""
        number = self._inspect(job)["job_id"]
        if follow:
            yield from logs.follow(self._api, number, lambda: self.poll(job).state)
        elif self.poll(job).state is not JobState.PENDING:
            yield from logs.snapshot(self._api, number)

    def cancel(self, job: Job) -> JobStatus:
        """End the job, and whatever else has its name."""
        status = status_of(self._end(self._inspect(job)))
        for other in self._named(_name(job)):
            self._end(other)
        return status

    def close(self) -> None:
        """Let go of the connections."""
        self._api.close()

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _launched(self, spec: JobSpec) -> Mapping[str, Any]:
        """The one job of a spec's name, after it was launched."""
        body = {"task": task_of(spec, resources_of(spec, self._resources), time.time()), "name": spec.name}
        try:
            found = self._api.launch(body, lambda: self._settle(spec.name))
        except (BadInput, ExecutorError):
            for left in self._named(spec.name):
                if status_of(left).half_submitted:  # SkyPilot keeps a job whose launch failed as pending for ever
                    self._end(left)
            raise
        found = found or self._settle(spec.name)
        if found is None:
            raise ExecutorError(f"{self._api.shown} launched {spec.name}, and doesn't list it")
        return found

    def _settle(self, name: str) -> Mapping[str, Any] | None:
        """The one job of a name, the first; any other is ended. None: there is none."""
        records = self._named(name)
        for other in records[1:]:
            self._end(other)
        return records[0] if records else None

    def _named(self, name: str) -> list[Mapping[str, Any]]:
        return [record for record in self._queue(name_match=name) if record["job_name"] == name and was_taken(record)]

    def _queue(self, **which: Any) -> list[Mapping[str, Any]]:
        """Records of this user's managed jobs by their numbers; others may give theirs the same names."""
        told = self._api.ask("/jobs/queue/v2", {"fields": list(FIELDS), **which})
        return sorted(told["jobs"], key=lambda record: record["job_id"])

    def _inspect(self, job: Job) -> Mapping[str, Any]:
        """The record of a job. Raises JobUnknown for a number whose job has another name: a bucket may say anything."""
        found = self._queue(job_ids=[int(job.id)]) if job.id.isascii() and job.id.isdigit() else []
        if not found or found[0]["job_name"] != _name(job):
            raise JobUnknown(f"SkyPilot ({self._api.shown}) has no managed job {job.id} of the name {_name(job)}")
        return found[0]

    def _end(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Cancel a job unless it has ended, and wait until it has."""
        number, deadline, pause_s = record["job_id"], time.monotonic() + CONFIRM_S, 0.1
        try:
            if not status_of(record).state.final:
                self._api.ask("/jobs/cancel", {"job_ids": [number]})
            while not status_of(record).state.final and time.monotonic() < deadline:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
                record = self._queue(job_ids=[number])[0]
        except (ExecutorError, BadInput) as error:
            raise type(error)(
                f"{error}: managed job {number} may still run, and be billed: see `sky jobs queue`"
            ) from error
        if not status_of(record).state.final:
            raise ExecutorError(
                f"managed job {number} is still {record['status']} {CONFIRM_S:g} s after it was cancelled, and may be "
                f"billed: see `sky jobs queue` and `sky status`"
            )
        return record

    def _job(self, record: Mapping[str, Any]) -> Job:
        name = parse_name(record["job_name"])
        assert name is not None
        return Job(PLATFORM, str(record["job_id"]), *name)

    # --- what the server offers ---------------------------------------------------------------------------------------

    def _enabled(self) -> list[str]:
        """The clouds that the server has access to, asked until there are some."""
        with self._lock:
            if not self._clouds:
                self._clouds = self._api.ask("/enabled_clouds")
            return self._clouds

    def _listed_now(self, spec: JobSpec) -> offers.Listed | None:
        """The accelerators of all clouds and regions; None where none are wanted, or the server tells of none."""
        if spec.resources.gpu:
            with suppress(ExecutorError, BadInput):
                self._api.health()  # one try, lest a dry run without a server waits
                if clouds := self._enabled():
                    body = {"clouds": clouds, "require_price": False, "all_regions": True}
                    return self._api.ask("/list_accelerators", body)
        return None


def _name(job: Job) -> str:
    return f"{job.run}--{job.site}--{job.attempt}"


def _given_resources() -> dict[str, Any]:
    text = os.environ.get(RESOURCES_VARIABLE) or "{}"
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise BadInput(
            f"{RESOURCES_VARIABLE} ({text}) must be SkyPilot's resources as a JSON object: "
            """write '{"use_spot": true, "infra": "aws/us-east-1"}'"""
        )
    return given
