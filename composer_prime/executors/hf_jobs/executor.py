"""Sites on Hugging Face Jobs: one job for each site and attempt, found again by its labels.

Facts about the service, and what was not run against it: docs/platforms.md.
"""

import os
import shlex
from collections.abc import Callable, Iterator
from datetime import date
from itertools import islice
from typing import Any

from huggingface_hub import JobInfo, Volume, constants

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import (
    LABEL_ATTEMPT,
    LABEL_RUN,
    LABEL_SITE,
    Job,
    JobSpec,
    Price,
    check_names,
    hides_secrets,
    refuse_placement,
)
from composer_prime.executors.hf_jobs import flavors
from composer_prime.executors.hf_jobs.api import NAMESPACE_VARIABLE, JobsApi, place_of
from composer_prime.executors.hf_jobs.status import status_of, unix
from composer_prime.executors.installing import installing, stock_image
from composer_prime.executors.prices import listed
from composer_prime.executors.unique_jobs import JobReport, UniqueJobs

PLATFORM = "hf-jobs"
HF_IMAGE_VARIABLE = "COMPOSER_PRIME_HF_IMAGE"
CACHE_BUCKET = "composer-prime-caches"
"""The private bucket of the namespace whose folders are the jobs' caches."""
OVERRUN_S = 60 + 30
"""What is billed beyond a job's time: the minute that was begun, and the seconds that containers get to end."""

_DOT_IN_LABEL = "DOT"
"""Labels take letters, digits, '-' and '_', but no dots, which names may have."""


class HfJobsExecutor(UniqueJobs):
    """The `Executor` for Hugging Face Jobs.

    namespace   who runs and pays the jobs, a user or an organization; None: COMPOSER_PRIME_HF_NAMESPACE, else the
                token's user
    endpoint, token   None: the client's own (HF_ENDPOINT; HF_TOKEN, or what `hf auth login` stored)
    """

    platform = PLATFORM
    confirm_s = 120.0

    def __init__(self, namespace: str | None = None, *, endpoint: str | None = None, token: str | None = None) -> None:
        self._api = JobsApi(namespace or os.environ.get(NAMESPACE_VARIABLE), endpoint, token)
        self._flavors: tuple[flavors.Flavor, ...] = ()

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        """Refuse what the service would refuse, or could only run wrongly."""
        check_names(spec)
        refuse_placement(spec, "Hugging Face Jobs")
        for what, name in (("run", spec.run), ("site", spec.site)):
            if _DOT_IN_LABEL in name:
                raise BadInput(
                    f"{what} ({name}) must not hold {_DOT_IN_LABEL!r}, which stands for a dot in labels: rename it"
                )
        if spec.secrets and constants.HF_DEBUG:
            raise BadInput("HF_DEBUG is set, and huggingface_hub then prints requests with their secrets: unset it")
        _image_of(spec)
        self._flavor(spec)

    def log_in(self) -> None:
        self.credentials()

    def credentials(self) -> dict[str, str]:
        return {"HF_TOKEN": self._api.token, NAMESPACE_VARIABLE: self._api.namespace}

    def account(self) -> str:
        return self._api.namespace

    def describe(self, spec: JobSpec) -> str:
        """The `hf jobs run` command that would start the same job; what it runs on stands in a comment."""
        flavor = self._flavor(spec)
        namespace = self._api.given_namespace
        bucket = f"{namespace or 'YOUR-USER'}/{CACHE_BUCKET}"
        options = [
            *([f"--namespace={namespace}"] if namespace else []),
            *(f"--flavor={flavor.name}", f"--timeout={spec.timeout_s}s", f"--name={_in_label(spec.name)}"),
            *(f"--label={label}={_in_label(value)}" for label, value in spec.labels.items()),
            *(f"--env={name}={value}" for name, value in _env(spec).items()),
            *(f"--secrets={name}" for name in spec.secrets),
            *(f"--volume=hf://buckets/{bucket}/{name}:{path}" for name, path in sorted(spec.caches.items())),
        ]
        command = shlex.join(["hf", "jobs", "run", "--detach", *options, _image_of(spec), "--", *spec.command])
        first = f"installs {spec.packages}, then runs\n" if spec.packages else ""
        return spec.secrets.redact(f"{first}{command}  # on {flavor}")

    def price(self, spec: JobSpec) -> Price:
        """What the flavor costs an hour; billed by the minute, from the job's start."""
        flavor = self._flavor(spec)
        if self._flavors:
            source = f"{self._api.client.endpoint}/api/jobs/hardware ({date.today()})"
        else:
            _, source = listed(PLATFORM)
        return Price(flavor.usd_per_hour, source, OVERRUN_S)

    def close(self) -> None:
        """Nothing: the connections are the client's, which shares them with all that use it in this process."""

    def _list(self, run: str, site: str | None, attempt: int | None) -> list[JobReport]:
        labels = {LABEL_RUN: run} | ({LABEL_SITE: site, LABEL_ATTEMPT: str(attempt)} if site is not None else {})
        infos = self._api.jobs({label: _in_label(value) for label, value in labels.items()})
        return [report for info in infos if (report := _report_of(info))]

    def _by_id(self, id: str) -> JobReport | None:
        return _report_of(self._api.ask("inspect_job", **place_of(id)))

    def _start(self, spec: JobSpec) -> list[JobReport]:
        found = self._api.run(lambda: self._settle(spec), **self._request(spec))
        report = found if isinstance(found, JobReport) else _report_of(found)
        return [report] if report else []

    def _request(self, spec: JobSpec) -> dict[str, Any]:
        """What the client's `run_job` takes, less the namespace. Makes the bucket of the caches."""
        bucket = f"{self._api.namespace}/{CACHE_BUCKET}"
        if spec.caches:
            self._api.ask("create_bucket", bucket_id=bucket, private=True, exist_ok=True)
        return {
            "image": _image_of(spec),
            "command": list(installing(spec, spec.packages) if spec.packages else spec.command),
            "env": _env(spec),
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

    def _log_reader(self, job: Job, to_end: bool) -> Callable[[], Iterator[str]]:
        given = 0

        def new_lines() -> Iterator[str]:
            nonlocal given
            for line in islice(self._api.log(job.id, follow=to_end), given, None):
                given += 1
                yield line

        return new_lines

    def _flavor(self, spec: JobSpec) -> flavors.Flavor:
        """The flavor by the service's list, which is asked once, and where that can't be had by the shipped one."""
        if not self._flavors:
            try:
                self._flavors = tuple(map(flavors.from_service, self._api.ask_once("list_jobs_hardware")))
            except (ExecutorError, BadInput):
                return flavors.choose(flavors.TABLE, spec.resources)
        return flavors.choose(self._flavors, spec.resources)


def _image_of(spec: JobSpec) -> str:
    if not (image := stock_image(spec.packages) if spec.packages else spec.image):
        raise BadInput(
            f"site {spec.site} has no image, and Hugging Face Jobs has no default: name one that holds "
            f"composer-prime, or set {HF_IMAGE_VARIABLE}"
        )
    return image


def _env(spec: JobSpec) -> dict[str, str]:
    return {**spec.cache_env, **spec.env}


def _in_label(name: str) -> str:
    return name.replace(".", _DOT_IN_LABEL)


def _report_of(info: JobInfo) -> JobReport | None:
    """A job as the service tells of it, by its name that reaches it from anywhere; None: it isn't ours."""
    labels = {label: value.replace(_DOT_IN_LABEL, ".") for label, value in (info.labels or {}).items()}
    run, site, attempt = (labels.get(label, "") for label in (LABEL_RUN, LABEL_SITE, LABEL_ATTEMPT))
    if not (run and site and attempt.isdecimal()):
        return None
    job = Job(PLATFORM, f"{info.owner.name}/{info.id}", run, site, int(attempt))
    return JobReport(job, status_of(info), unix(info.created_at) or 0.0, info.url)
