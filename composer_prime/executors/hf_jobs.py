"""Sites on Hugging Face Jobs: one job for each site and attempt, found again by its labels.

Its own client is asked, with time-outs, repeats and errors that say what to do: left alone it waits for ever, repeats
listings only, and tells errors in several lines of HTTP. Facts about the service, and what was not run against it:
docs/platforms.md.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date, datetime
from functools import cached_property
from typing import Any

import httpx2
from huggingface_hub import HfApi, JobHardwareInfo, JobInfo, Volume, constants, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError, JobNotFoundError, OfflineModeIsEnabled

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
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
from composer_prime.executors.packages import UV_IMAGE
from composer_prime.executors.services import (
    Busy,
    JobReport,
    UniqueJobs,
    cheapest,
    first_line,
    patiently,
    refusal,
    told_exit_code,
)
from composer_prime.plan.prices import Machine, listed, shipped

NAMESPACE_VARIABLE = "COMPOSER_PRIME_HF_NAMESPACE"
REQUEST_TIMEOUT_S = 30
"""Without a byte from the service for so long, a request counts as lost."""

_JOB = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([0-9a-f]{24})")
_SIGN_IN = "set HF_TOKEN, or sign in with `hf auth login`"
_TOKENS = "huggingface.co/settings/tokens"
_REFUSED = "Hugging Face Jobs does not take this job: correct what it names"
_REMEDIES = {
    400: _REFUSED,
    401: f"the Hugging Face token is not valid: {_SIGN_IN}",
    402: "no credit for Hugging Face Jobs: see huggingface.co/settings/billing",
    403: f"the token may not start and manage jobs: make one that may at {_TOKENS}, and {_SIGN_IN}",
    404: f"Hugging Face has no such namespace, or hides it: correct {NAMESPACE_VARIABLE}",
    422: _REFUSED,
}


class JobsApi:
    """The jobs of one namespace (a user or an organization). May be used by several threads at once.

    endpoint, token   None: the client's own (HF_ENDPOINT; HF_TOKEN or what `hf auth login` stored)
    """

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        self.client = HfApi(endpoint=endpoint, token=token)

    @property
    def token(self) -> str:
        """The token. Raises BadInput when there is none."""
        if not (token := self.client.token or get_token()):
            raise BadInput(f"Hugging Face Jobs needs a token, and there is none: {_SIGN_IN}")
        return str(token)

    @cached_property
    def namespace(self) -> str:
        """Whose jobs these are, the token's own user's where none is named. Raises BadInput when there is no token."""
        _ = self.token
        return os.environ.get(NAMESPACE_VARIABLE) or str(self.ask("whoami")["name"])

    def ask(self, method: str, **arguments: Any) -> Any:
        """The answer of a method of the client, by several tries."""
        return patiently(lambda: self.ask_once(method, **arguments))

    def ask_once(self, method: str, **arguments: Any) -> Any:
        """The same by one try. Raises BadInput, JobUnknown, Busy, or ExecutorError."""
        with self._translated():
            return getattr(self.client, method)(**arguments)

    def items(self, method: str, **arguments: Any) -> Iterator[Any]:
        """What a method gives one by one. The client itself repeats listings, and takes up broken streams of a log."""
        with self._translated():
            yield from getattr(self.client, method)(**arguments)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the client's errors into ours, and limit the waits of its session, which it shares with others."""
        endpoint = self.client.endpoint
        try:
            get_session().timeout = httpx2.Timeout(REQUEST_TIMEOUT_S)
            yield
        except OfflineModeIsEnabled as error:
            raise BadInput("HF_HUB_OFFLINE is set, and Hugging Face Jobs can't be reached with it: unset it") from error
        except HfHubHTTPError as error:
            raise _refusal(endpoint, error) from error
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise Busy(f"no answer from {endpoint} ({type(error).__name__}: {error})") from error
        except ValueError as error:  # a page of some proxy instead of an answer
            raise Busy(f"{endpoint} gave no readable answer ({error})") from error


def place_of(name: str) -> dict[str, Any]:
    """The client's arguments for "namespace/id". Raises JobUnknown for what names no job: it would ask for its URL."""
    if not (match := _JOB.fullmatch(name)):
        raise JobUnknown(f"job ({name}) must be namespace/id with 24 hex digits: Hugging Face Jobs has no other")
    return {"namespace": match[1], "job_id": match[2]}


def flavor_of(hardware: JobHardwareInfo) -> Machine:
    """A machine that the service has, as it tells of it."""
    accelerator = hardware.accelerator
    return Machine(
        name=hardware.name,
        gpu=accelerator.model.replace(" ", "-") if accelerator else "",
        num_gpus=_number(accelerator.quantity) if accelerator else 0,
        usd_per_hour=round(hardware.unit_cost_usd * 60, 2) if hardware.unit_label == "minute" else None,
        cpus=_number(hardware.cpu),
        memory_gb=_number(hardware.ram),
        disk_gb=_number(hardware.ephemeral_storage),
    )


def _number(text: str) -> float:
    """The figure at the start of "142 GB"; 0 where there is none ("N/A"), so that nothing fits by mistake."""
    match = re.match(r"\d+(\.\d+)?", text)
    return float(match[0]) if match else 0.0


def _refusal(endpoint: str, error: HfHubHTTPError) -> BadInput | ExecutorError:
    answer = error.response
    where = f"{endpoint} answered {answer.status_code} ({first_line(error.server_message or str(error))})"
    if isinstance(error, JobNotFoundError):
        return JobUnknown(f"{where}: Hugging Face Jobs has no such job (any more)")
    return refusal(where, answer.status_code, _REMEDIES)


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
