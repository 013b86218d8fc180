"""Sites on Hugging Face Jobs: one job for each site and attempt, found again by its labels.

The service keeps no two jobs apart by name, so that the oldest of those that carry the same labels is the job, and
whoever sees another one ends it. Facts about the service, and what was not run against it: docs/run-anywhere.md.
"""

import os
import shlex
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors.base import (
    LABEL_ATTEMPT,
    LABEL_RUN,
    LABEL_SITE,
    Job,
    JobSpec,
    JobStatus,
    Price,
    check_names,
    hides_secrets,
    refuse_placement,
)
from composer_prime.executors.hf_jobs import flavors
from composer_prime.executors.hf_jobs.api import JobsApi, age
from composer_prime.executors.hf_jobs.logs import lines
from composer_prime.executors.hf_jobs.status import is_final, status_of
from composer_prime.executors.installing import installing, stock_image
from composer_prime.executors.prices import flavor_price

if TYPE_CHECKING:
    from huggingface_hub import JobInfo

PLATFORM = "hf-jobs"
NAMESPACE_VARIABLE, HF_IMAGE_VARIABLE = "COMPOSER_PRIME_HF_NAMESPACE", "COMPOSER_PRIME_HF_IMAGE"
CACHE_BUCKET = "composer-prime-caches"
"""The private bucket of the namespace whose folders are the jobs' caches."""
OVERRUN_S = 60 + 30
"""What is billed beyond a job's time: the minute that was begun, and the seconds that containers get to end."""
CONFIRM_S = 120.0
"""For so long a cancelled job may go on before that is an error."""

_DOT_IN_LABEL = "DOT"
"""Labels take letters, digits, '-' and '_', but no dots, which names may have."""


class HfJobsExecutor:
    """The `Executor` for Hugging Face Jobs.

    namespace   who runs and pays the jobs, a user or an organization; None: COMPOSER_PRIME_HF_NAMESPACE, else the
                token's user
    endpoint, token   None: the client's own (HF_ENDPOINT; HF_TOKEN, or what `hf auth login` stored)
    """

    platform = PLATFORM

    def __init__(self, namespace: str | None = None, *, endpoint: str | None = None, token: str | None = None) -> None:
        self._api = JobsApi(namespace or os.environ.get(NAMESPACE_VARIABLE), endpoint, token)
        self._lock = threading.Lock()
        self._flavors: tuple[flavors.Flavor, ...] | None = None

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        """Refuse what the service would refuse, or could only run wrongly."""
        self._image_of(spec)
        _check_spec(spec)
        self._api.check_client(with_secrets=len(spec.secrets) > 0)
        self._flavor(spec)

    def log_in(self) -> None:
        self._api.check_login()

    def credentials(self) -> dict[str, str]:
        return {"HF_TOKEN": self._api.token, NAMESPACE_VARIABLE: self._api.namespace}

    def describe(self, spec: JobSpec) -> str:
        """The `hf jobs run` command that would start the same job; what it runs on stands in a comment."""
        image = self._image_of(spec)
        _check_spec(spec)
        flavor = self._flavor(spec)
        namespace = self._api.given_namespace
        bucket = f"{namespace or 'YOUR-USER'}/{CACHE_BUCKET}"
        options = [
            *(["--namespace", namespace] if namespace else []),
            *["--flavor", flavor.name, "--timeout", f"{spec.timeout_s}s", "--name", _in_label(spec.name)],
            *(part for label, value in _labels(spec).items() for part in ("--label", f"{label}={value}")),
            *(part for name, value in _env(spec).items() for part in ("--env", f"{name}={value}")),
            *(part for name in spec.secrets for part in ("--secrets", name)),
            *(f"--volume=hf://buckets/{bucket}/{name}:{path}" for name, path in sorted(spec.caches.items())),
        ]
        command = shlex.join(["hf", "jobs", "run", "--detach", *options, image, "--", *spec.command])
        first = f"installs {spec.packages}, then runs\n" if spec.packages else ""
        return spec.secrets.redact(f"{first}{command}  # on {flavor}")

    def price(self, spec: JobSpec) -> Price:
        """What the flavor costs an hour; billed by the minute, from the job's start."""
        listed = self._hardware()
        flavor = flavors.choose(listed, spec.resources)
        if listed is flavors.TABLE:
            return replace(flavor_price(flavor.name), overrun_s=OVERRUN_S)
        source = f"{self._api.client.endpoint}/api/jobs/hardware ({date.today()})"
        return Price(flavor.usd_per_hour, source, OVERRUN_S)

    @hides_secrets
    def submit(self, spec: JobSpec) -> Job:
        """Start the job, or return the one that carries its labels."""
        self.check(spec)
        self.log_in()
        try:
            if (standing := self._settle(spec)) is None:
                request = self._request(spec)
                started = self._api.run(lambda: self._settle(spec), **request)
                standing = self._settle(spec, started)
        except ExecutorError as error:
            raise type(error)(f"{error}: the job may have been started: launch again, which finds it") from error
        assert standing is not None
        return self._job(standing)

    def account(self) -> str:
        return self._api.namespace

    def find(self, run: str) -> list[Job]:
        """The run's jobs by site and attempt."""
        by_name: dict[tuple[str, int], Job] = {}
        for info in self._api.jobs({LABEL_RUN: _in_label(run)}):
            if _is_ours(info):
                job = self._job(info)
                by_name.setdefault((job.site, job.attempt), job)
        return [job for _, job in sorted(by_name.items())]

    def poll(self, job: Job) -> JobStatus:
        """How the job is now."""
        return status_of(self._inspect(job))

    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        """The job's lines, standard output and error together."""
        ended = self.poll(job).state.final  # then the client follows to the log's end, and elsewhere stops at silence
        yield from lines(self._api, job.id, lambda: self.poll(job).state, follow=follow or ended)

    def cancel(self, job: Job) -> JobStatus:
        """End the job, and whatever else carries its labels."""
        status = status_of(self._end(self._inspect(job)))
        for info in self._api.jobs(_labels_of(job)):
            if not is_final(info):
                self._end(info)
        return status

    def close(self) -> None:
        """Nothing: the connections are the client's, which shares them with all that use it in this process."""

    def _inspect(self, job: Job) -> "JobInfo":
        """What the service says of a job. Raises JobUnknown for an id whose labels are another's: a record in a bucket
        may say anything."""
        info = self._api.inspect(job.id)
        if not _labels_of(job).items() <= (info.labels or {}).items():
            raise JobUnknown(f"{job.id} isn't labelled as attempt {job.attempt} of {job.run} {job.site}")
        return info

    def _request(self, spec: JobSpec) -> dict[str, Any]:
        """What the client's `run_job` takes, less the namespace. Makes the bucket of the caches."""
        bucket = f"{self._api.namespace}/{CACHE_BUCKET}"
        if spec.caches:
            self._api.make_bucket(bucket)
        return {
            "image": self._image_of(spec),
            "command": list(installing(spec, spec.packages) if spec.packages else spec.command),
            "env": _env(spec),
            "secrets": spec.secrets.reveal(),
            "flavor": self._flavor(spec).name,
            "timeout": spec.timeout_s,
            "name": _in_label(spec.name),
            "labels": _labels(spec),
            "volumes": [self._api.volume(bucket, name, path) for name, path in sorted(spec.caches.items())],
        }

    def _settle(self, spec: JobSpec, *started: "JobInfo") -> "JobInfo | None":
        """The one job of this run, site and attempt, the oldest; any other is ended. None: there is none."""
        found = {info.id: info for info in (*started, *self._api.jobs(_labels(spec)))}
        oldest_first = sorted(found.values(), key=age)
        for other in oldest_first[1:]:
            if not is_final(other):
                self._end(other)
        return oldest_first[0] if oldest_first else None

    def _end(self, info: "JobInfo") -> "JobInfo":
        """Cancel a job unless it has ended, and wait until it has."""
        if is_final(info):
            return info
        name = _name(info)
        try:
            self._cancel_unless_ended(name)
            deadline, pause_s = time.monotonic() + CONFIRM_S, 0.1
            while not is_final(info := self._api.inspect(name)) and time.monotonic() < deadline:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
        except JobUnknown:
            raise
        except (ExecutorError, BadInput) as error:
            raise type(error)(f"{error}: job {name} may still run, and be billed: see {info.url}") from error
        if not is_final(info):
            raise ExecutorError(
                f"job {name} is still {info.status.stage} {CONFIRM_S:g} s after it was cancelled, and may be billed: "
                f"end it at {info.url}"
            )
        return info

    def _cancel_unless_ended(self, name: str) -> None:
        try:
            self._api.cancel(name)
        except (ExecutorError, BadInput):
            if not is_final(self._api.inspect(name)):  # it may have ended in between
                raise

    def _job(self, info: "JobInfo") -> Job:
        labels = info.labels or {}
        run = _out_of_label(labels[LABEL_RUN])
        return Job(PLATFORM, _name(info), run, labels[LABEL_SITE], int(labels[LABEL_ATTEMPT]))

    def _image_of(self, spec: JobSpec) -> str:
        if not (image := stock_image(spec.packages) if spec.packages else spec.image):
            raise BadInput(
                f"site {spec.site} has no image, and Hugging Face Jobs has no default: name one that holds "
                f"composer-prime, or set {HF_IMAGE_VARIABLE}"
            )
        return image

    def _flavor(self, spec: JobSpec) -> flavors.Flavor:
        return flavors.choose(self._hardware(), spec.resources)

    def _hardware(self) -> tuple[flavors.Flavor, ...]:
        """The service's list, asked once; the documentation's table where it can't be had, as in a dry run offline."""
        with self._lock:
            if self._flavors is None:
                try:
                    self._flavors = flavors.from_service(self._api.hardware())
                except (ExecutorError, BadInput):
                    return flavors.TABLE
            return self._flavors


def _check_spec(spec: JobSpec) -> None:
    """Refuse what can be seen without asking the service."""
    check_names(spec)
    refuse_placement(spec, "Hugging Face Jobs")
    for what, name in (("run", spec.run), ("site", spec.site)):
        if _DOT_IN_LABEL in name:
            raise BadInput(
                f"{what} ({name}) must not hold {_DOT_IN_LABEL!r}, which stands for a dot in labels: rename it"
            )
    for name, path in spec.caches.items():
        if not path.startswith("/") or path == "/":
            raise BadInput(f"cache {name} ({path}) must be an absolute path below / in the container: correct it")


def _env(spec: JobSpec) -> dict[str, str]:
    return {**spec.cache_env, **spec.env}


def _labels(spec: JobSpec) -> dict[str, str]:
    return {label: _in_label(value) for label, value in spec.labels.items()}


def _labels_of(job: Job) -> dict[str, str]:
    return {LABEL_RUN: _in_label(job.run), LABEL_SITE: _in_label(job.site), LABEL_ATTEMPT: str(job.attempt)}


def _in_label(name: str) -> str:
    return name.replace(".", _DOT_IN_LABEL)


def _out_of_label(value: str) -> str:
    return value.replace(_DOT_IN_LABEL, ".")


def _is_ours(info: "JobInfo") -> bool:
    labels = info.labels or {}
    attempt = labels.get(LABEL_ATTEMPT, "")
    return LABEL_RUN in labels and LABEL_SITE in labels and attempt.isascii() and attempt.isdigit()


def _name(info: "JobInfo") -> str:
    """What reaches the job from anywhere: the `hf` command takes it as well."""
    return f"{info.owner.name}/{info.id}"
