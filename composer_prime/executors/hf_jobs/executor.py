"""Sites on Hugging Face Jobs: one job for each site and attempt, found again by its labels.

Facts about the service, and what was not run against it: docs/platforms.md.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, datetime
from typing import Any

from huggingface_hub import JobInfo, Volume, constants

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import (
    LABEL_ATTEMPT,
    LABEL_RUN,
    LABEL_SITE,
    Job,
    JobSpec,
    JobState,
    JobStatus,
    Price,
    check_names,
    hides_secrets,
    refuse_placement,
)
from composer_prime.executors.choice import cheapest
from composer_prime.executors.hf_jobs.api import NAMESPACE_VARIABLE, REQUEST_TIMEOUT_S, JobsApi, flavor_of, place_of
from composer_prime.executors.packages import UV_IMAGE
from composer_prime.executors.unique_jobs import JobReport, UniqueJobs, told_exit_code
from composer_prime.plan.prices import Machine, listed, shipped

PLATFORM = "hf-jobs"
CACHE_BUCKET = "composer-prime-caches"
"""The private bucket of the namespace whose folders are the jobs' caches."""
OVERRUN_S = 60 + 30
"""Seconds billed beyond a job's time: the minute that was begun, and those that containers get to end."""

_DOT_IN_LABEL = "DOT"
"""Labels take letters, digits, '-' and '_', but no dots, which names may have."""
_STATES = {
    "SCHEDULING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "COMPLETED": JobState.SUCCEEDED,
    "CANCELED": JobState.CANCELLED,
    "DELETED": JobState.CANCELLED,
    "ERROR": JobState.FAILED,
}
_TIMED_OUT = re.compile(r"timed?[ -]?out|DeadlineExceeded", re.IGNORECASE)
_TAKEN_BACK = re.compile(
    r"preempt|evict|NodeLost|NodeShutdown|TerminationByKubelet|DeletionByTaintManager|reclaimed", re.IGNORECASE
)
"""Its words for a machine that was taken back aren't known: those of Kubernetes, which it runs on, stand in."""


class HfJobsExecutor(UniqueJobs):
    """The `Executor` for Hugging Face Jobs.

    endpoint, token   None: the client's own (HF_ENDPOINT; HF_TOKEN, or what `hf auth login` stored)
    """

    platform = PLATFORM
    confirm_s = 120.0

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        self._api = JobsApi(endpoint, token)
        self._flavors: tuple[Machine, ...] = ()

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        check_names(spec)
        refuse_placement(spec, "Hugging Face Jobs")
        for what, name in (("run", spec.run), ("site", spec.site)):
            if _DOT_IN_LABEL in name:
                raise BadInput(
                    f"{what} ({name}) must not hold {_DOT_IN_LABEL!r}, which stands for a dot in labels: rename it"
                )
        if spec.secrets and constants.HF_DEBUG:
            raise BadInput("HF_DEBUG is set, and huggingface_hub then prints requests with their secrets: unset it")
        self._flavor(spec)

    def credentials(self) -> dict[str, str]:
        return {"HF_TOKEN": self._api.token, NAMESPACE_VARIABLE: self._api.namespace}

    def account(self) -> str:
        return self._api.namespace

    def machine(self, spec: JobSpec) -> str:
        return f"flavor {self._flavor(spec)}"

    def price(self, spec: JobSpec) -> Price:
        """The flavor's price; billed by the minute, from the job's start."""
        flavor = self._flavor(spec)
        if self._flavors:
            source = f"{self._api.client.endpoint}/api/jobs/hardware ({date.today()})"
        else:
            _, source = listed(PLATFORM)
        return Price(flavor.usd_per_hour, source, OVERRUN_S)

    def _list(self, run: str, site: str | None, attempt: int | None) -> list[JobReport]:
        labels = {LABEL_RUN: run} | ({LABEL_SITE: site, LABEL_ATTEMPT: str(attempt)} if site is not None else {})
        asked = {label: _in_label(value) for label, value in labels.items()}
        infos = self._api.items("list_jobs", labels=asked, namespace=self._api.namespace, timeout=REQUEST_TIMEOUT_S)
        return [report for info in infos if (report := _report_of(info))]

    def _by_id(self, id: str) -> JobReport | None:
        return _report_of(self._api.ask("inspect_job", **place_of(id)))

    def _start(self, spec: JobSpec) -> list[JobReport]:
        # By one try: when its answer is lost, there may be a job.
        report = _report_of(self._api.ask_once("run_job", namespace=self._api.namespace, **self._request(spec)))
        return [report] if report else []

    def _request(self, spec: JobSpec) -> dict[str, Any]:
        """The arguments of the client's `run_job`, less the namespace. Makes the bucket of the caches."""
        bucket = f"{self._api.namespace}/{CACHE_BUCKET}"
        if spec.caches:
            self._api.ask("create_bucket", bucket_id=bucket, private=True, exist_ok=True)
        return {
            "image": spec.image or UV_IMAGE,
            "command": spec.installing_command,
            "env": spec.variables,
            "secrets": spec.secrets.reveal(),
            "flavor": self._flavor(spec).name,
            "timeout": spec.timeout_s,
            "name": _in_label(spec.name),
            "labels": {label: _in_label(value) for label, value in spec.labels.items()},
            "volumes": [
                Volume(type="bucket", source=bucket, path=name, mount_path=path)
                for name, path in sorted(spec.caches.items())
            ],
        }

    def _ask_end(self, job: Job) -> None:
        try:
            self._api.ask("cancel_job", **place_of(job.id))
        except (ExecutorError, BadInput):
            if not self.poll(job).state.final:  # it may have ended in between
                raise

    def _log(self, job: Job, to_end: bool) -> Iterator[tuple[str, str]]:
        return (("", line) for line in self._api.items("fetch_job_logs", **place_of(job.id), follow=to_end))

    def _flavor(self, spec: JobSpec) -> Machine:
        """The flavor by the service's list, which is asked once, and where that can't be had by the shipped one."""
        if not self._flavors:
            with suppress(ExecutorError, BadInput):
                self._flavors = tuple(map(flavor_of, self._api.ask_once("list_jobs_hardware")))
        return cheapest(self._flavors or shipped(PLATFORM), spec.resources, "Hugging Face Jobs")


def _in_label(name: str) -> str:
    return name.replace(".", _DOT_IN_LABEL)


def _report_of(info: JobInfo) -> JobReport | None:
    """A job as the service tells of it, by its name that reaches it from anywhere; None: it isn't ours."""
    labels = {label: value.replace(_DOT_IN_LABEL, ".") for label, value in (info.labels or {}).items()}
    run, site, attempt = (labels.get(label, "") for label in (LABEL_RUN, LABEL_SITE, LABEL_ATTEMPT))
    if not (run and site and attempt.isdecimal()):
        return None
    job = Job(PLATFORM, f"{info.owner.name}/{info.id}", run, site, int(attempt))
    return JobReport(job, status_of(info), _unix(info.created_at) or 0.0, info.url)


def status_of(info: JobInfo) -> JobStatus:
    """The status by a job's stage and message: the service tells how one ended in words only."""
    stage, said = str(info.status.stage), info.status.message or ""
    state = _STATES.get(stage, JobState.RUNNING)  # a stage nobody knows may be billed
    exit_code = 0 if state is JobState.SUCCEEDED else None
    if state is JobState.FAILED:
        if _TAKEN_BACK.search(said):
            state = JobState.PREEMPTED
        elif _TIMED_OUT.search(said):
            state = JobState.TIMED_OUT
        else:
            exit_code = told_exit_code(said)
    message = f"{stage}: {said}" if said else stage
    return JobStatus(state, exit_code, message, _unix(info.started_at), _unix(info.finished_at))


def _unix(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()
