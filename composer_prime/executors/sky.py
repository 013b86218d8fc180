"""Sites as SkyPilot's managed jobs: on its clouds, Kubernetes, Slurm and machines of one's own, recovered by itself.

A job that loses its machine is started again elsewhere by SkyPilot, as the same job and attempt, and goes on from the
bucket. SkyPilot gives managed jobs no time-out, so the task's script ends the command. It also frames the command's
lines in the log, since SkyPilot puts its own words before, after and in front of them.
"""

import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import date
from typing import Any

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import (
    Job,
    JobSpec,
    JobState,
    JobStatus,
    Price,
    check_names,
    gpu_kinds,
    hides_secrets,
    parse_name,
)
from composer_prime.executors.local import split_lines
from composer_prime.executors.services import Busy, JobReport, UniqueJobs, first_line, fitting, told_exit_code
from composer_prime.executors.shim import GRACE_S
from composer_prime.executors.sky_api import SkyApi
from composer_prime.plan.prices import Machine, listed, shipped

RESOURCES_VARIABLE = "COMPOSER_PRIME_SKY_RESOURCES"
START_ALLOWANCE_S = 600
"""A job whose machine is there so soon after its launch has all of its time; waiting for longer shortens it."""
TEARDOWN_S = 600
OVERRUN_S = START_ALLOWANCE_S + round(GRACE_S) + TEARDOWN_S
"""Seconds that may be billed beyond a job's time: machines are billed while they start and until they are gone."""
TIMED_OUT = 124
"""The script's exit code after the job's time. SkyPilot tells no more of an end than the exit code."""
_BEGINS, _ENDS = "composer-prime: log {} begins", "composer-prime: log {} ends"
"""Names the log, which is another one after each recovery, and shows what SkyPilot puts in front of each line."""
_BEGUN = re.compile(re.escape(_BEGINS.format("@")).replace("@", r"(\d+-\d+)") + "$")
_PAYLOAD = "<sky-payload>"
"""Begins the lines that move the spinner of SkyPilot's own client."""
FIELDS = ("job_id", "job_name", "status", "schedule_state", "failure_reason", "start_at", "end_at")
"""The fields that are asked of a managed job's record."""

_NAME = re.compile(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*")
_NO_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON takes as they are, and YAML for the end of a line or for none."""
_STATES = {
    "PENDING": JobState.PENDING,
    "SUBMITTED": JobState.PENDING,
    "STARTING": JobState.PENDING,
    "RECOVERING": JobState.PENDING,
    "SUCCEEDED": JobState.SUCCEEDED,
    "CANCELLED": JobState.CANCELLED,
    **{f"FAILED{why}": JobState.FAILED for why in ("", "_SETUP", "_PRECHECKS", "_NO_RESOURCE", "_CONTROLLER")},
}

_SCRIPT = """\
exec </dev/null 2>/dev/null
log=$(date +%s%N)-$$
left=$(( {deadline} - $(date +%s) ))
[ "$left" -le {timeout_s} ] || left={timeout_s}
if [ "$left" -le 0 ]; then echo "composer-prime: no time left: its machine came too late"; exit {timed_out}; fi
echo "{begins}"
began=$SECONDS
timeout --kill-after={grace_s:g} "$left" {command} 2>&1
code=$?
echo "{ends}"
[ $(( SECONDS - began )) -ge "$left" ] && [ "$code" -ne 0 ] && code={timed_out}
exit "$code"
"""


def check_task(spec: JobSpec) -> None:
    """Refuse, with BadInput, what can be seen without asking the server."""
    check_names(spec)
    if not _NAME.fullmatch(spec.name) or parse_name(spec.name) != (spec.run, spec.site, spec.attempt):
        raise BadInput(
            f"run {spec.run} and site {spec.site} make the job's name {spec.name}, which SkyPilot can't hold or tell "
            "apart: both must end in a letter or digit and hold at most two of '.', '_', '-' in a row, the site no '--'"
        )


def resources_of(spec: JobSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """SkyPilot's `resources` of a job: what it asks for, over what is `given` for all jobs."""
    asked = spec.resources
    if "image_id" in given:
        raise BadInput(f"image_id ({given['image_id']}) in {RESOURCES_VARIABLE}: drop it, and name an image by --image")
    kinds = [f"{kind}:{asked.gpu_count or 1}" for kind in gpu_kinds(asked)]
    wanted = {
        "accelerators": kinds if len(kinds) > 1 else next(iter(kinds), None),
        "cpus": asked.cpus and f"{asked.cpus:g}+",
        "memory": asked.memory_gib and f"{asked.memory_gib:g}+",
        "disk_size": asked.disk_gib and round(asked.disk_gib),
        "image_id": spec.image and f"docker:{spec.image}",
        "infra": f"{asked.cloud or '*'}/{asked.region or '*'}" if asked.cloud or asked.region else None,
        "use_spot": False if asked.nonpreemptible else None,
    }
    return {**given, **{name: value for name, value in wanted.items() if value is not None}}


def task_of(spec: JobSpec, resources: Mapping[str, Any], now: float) -> str:
    """The task as YAML, which JSON is. now: Unix seconds."""
    task = {
        "name": spec.name,
        "resources": dict(resources),
        "envs": spec.variables,
        "secrets": spec.secrets.reveal(),
        "run": _SCRIPT.format(
            deadline=round(now) + spec.timeout_s + START_ALLOWANCE_S,
            timeout_s=spec.timeout_s,
            timed_out=TIMED_OUT,
            grace_s=GRACE_S,
            begins=_BEGINS.format("$log"),
            ends=_ENDS.format("$log"),
            command=shlex.join(spec.installing_command),
        ),
    }
    text = json.dumps(task, ensure_ascii=False)
    return _NO_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def status_of(record: Mapping[str, Any]) -> JobStatus:
    """A job's status by the managed job's record."""
    status, reason = str(record["status"]), record.get("failure_reason") or ""
    state = _STATES.get(status, JobState.RUNNING)  # a state nobody knows may be billed
    exit_code = 0 if state is JobState.SUCCEEDED else None
    if status == "FAILED" and (exit_code := told_exit_code(reason)) == TIMED_OUT:
        state, exit_code = JobState.TIMED_OUT, None
    message = f"{status}: {first_line(reason)}" if reason else status
    half = status == "PENDING" and record.get("schedule_state") == "INACTIVE"
    return JobStatus(state, exit_code, message, record.get("start_at"), record.get("end_at"), half)


def command_lines(chunks: Iterator[bytes]) -> Iterator[tuple[str, str]]:
    """The command's lines in a stream from a log's start, each with its log's name."""
    log = prefix = ""
    for line in split_lines(chunks):
        if match := _BEGUN.search(line):
            log, prefix = match[1], line[: match.start()]
        elif log and line.startswith(prefix) and not line.startswith(_PAYLOAD):
            name, text, end = log, line.removeprefix(prefix), _ENDS.format(log)
            if text.endswith(end):
                text, log = text.removesuffix(end), ""
            if text or log:
                yield name, text


PLATFORM = "sky"
WHERE = "SkyPilot (in its enabled clouds)"
_OWN = ("kubernetes", "ssh", "slurm")
"""Clouds that are machines of one's own: SkyPilot lists no price for them."""


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
        check_task(spec)
        resources_of(spec, self._resources)
        if (known := self._known(spec)) is not None:
            fitting(known, spec.resources, WHERE)

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

    def machine(self, spec: JobSpec) -> str:
        return f"SkyPilot's ({self._api.shown}) by resources {json.dumps(resources_of(spec, self._resources))}"

    def price(self, spec: JobSpec) -> Price:
        """Of the dearest machine, by the server's catalog, else by the shipped table: SkyPilot goes on to dearer ones
        where the cheaper ones are out."""
        resources = resources_of(spec, self._resources)
        if (most := resources.get("max_hourly_cost")) is not None:
            return Price(float(most), "max_hourly_cost, above which SkyPilot takes no machine", OVERRUN_S)
        if spec.resources.gpu is None:
            return Price(None, "SkyPilot's API tells the price of no machine without a GPU", OVERRUN_S)
        if (known := self._known(spec)) is None:
            return self._stale_price(spec)
        infra = str(resources.get("infra", "")).partition("/")[0].lower().replace("k8s", "kubernetes")
        found = [each for each in fitting(known, spec.resources, WHERE) if infra in ("", "*", each.where)]
        if found and all(each.where in _OWN for each in found):
            return Price(0.0, "machines of your own", OVERRUN_S)
        usd = sorted(each.usd_per_hour for each in found if each.usd_per_hour is not None)
        catalog = f"SkyPilot's catalog at {self._api.shown}"
        if not usd:
            return Price(None, f"{catalog} has no price of it", OVERRUN_S)
        return Price(usd[-1], f"{catalog} ({date.today()}), from ${usd[0]:.2f} on: the dearest", OVERRUN_S)

    def _stale_price(self, spec: JobSpec) -> Price:
        usd = None
        with suppress(BadInput):  # which isn't all that SkyPilot has
            usd = max(each.usd_per_hour or 0.0 for each in fitting(shipped(PLATFORM), spec.resources, WHERE))
        source = f"stale, since the server tells no price: {listed(PLATFORM)[1]}"
        return Price(usd, source, OVERRUN_S, f"give max_hourly_cost in {RESOURCES_VARIABLE}")

    def close(self) -> None:
        self._api.close()

    def _list(self, run: str, site: str | None, attempt: int | None) -> list[JobReport]:
        records = self._queue(name_match=f"{run}--" if site is None else f"{run}--{site}--{attempt}")
        # Of others the launch failed, and what that left was cancelled.
        taken = [each for each in records if (each["status"], each.get("schedule_state")) != ("CANCELLED", "INACTIVE")]
        return [report for record in taken if (report := _report_of(record))]

    def _by_id(self, id: str) -> JobReport | None:
        found = self._queue(job_ids=[int(id)]) if id.isdecimal() else []
        return _report_of(found[0]) if found else None

    def _queue(self, **which: Any) -> list[Mapping[str, Any]]:
        """Records of this user's managed jobs; others may give theirs the same names."""
        return self._api.ask("/jobs/queue/v2", {"fields": list(FIELDS), **which})["jobs"]

    def _start(self, spec: JobSpec) -> list[JobReport]:
        body = {"task": task_of(spec, resources_of(spec, self._resources), time.time()), "name": spec.name}
        try:
            self._api.launch(body)
        except Busy:
            raise  # the answer was lost, and the job may be on its way
        except (BadInput, ExecutorError):
            for left in self._named(spec.run, spec.site, spec.attempt):
                if left.status.half_submitted:  # SkyPilot keeps a job whose launch failed as pending for ever
                    self._end(left)
            raise
        return []

    def _ask_end(self, job: Job) -> None:
        self._api.ask("/jobs/cancel", {"job_ids": [int(job.id)]})

    def _log(self, job: Job, to_end: bool) -> Iterator[tuple[str, str]]:
        return command_lines(self._api.log(int(job.id), follow=to_end))

    def _known(self, spec: JobSpec) -> list[Machine] | None:
        """The machines with GPUs of all clouds and regions; None: none is wanted, or the server tells of none."""
        if spec.resources.gpu:
            with suppress(ExecutorError, BadInput):
                self._api.health()  # one try, lest a dry run without a server waits
                if clouds := self._api.ask("/enabled_clouds"):
                    body = {"clouds": clouds, "require_price": False, "all_regions": True}
                    told = self._api.ask("/list_accelerators", body)
                    usd = 8 if resources_of(spec, self._resources).get("use_spot") else 7  # of an offer's ten fields
                    return [
                        Machine(gpu, gpu, offer[3], offer[usd], where=offer[0].lower())
                        for gpu, offers in told.items()
                        for offer in offers
                    ]
        return None


def _report_of(record: Mapping[str, Any]) -> JobReport | None:
    """A job by the managed job's record, of two of a name the one with the lower number first; None: it isn't ours."""
    if (name := parse_name(record["job_name"])) is None:
        return None
    number = record["job_id"]
    return JobReport(Job(PLATFORM, str(number), *name), status_of(record), number, "`sky jobs queue` and `sky status`")


def _given_resources() -> dict[str, Any]:
    text = os.environ.get(RESOURCES_VARIABLE) or "{}"
    with suppress(ValueError):
        if isinstance(given := json.loads(text), dict):
            return given
    raise BadInput(
        f"{RESOURCES_VARIABLE} ({text}) must be SkyPilot's resources as a JSON object: "
        """write '{"use_spot": true, "infra": "aws/us-east-1"}'"""
    )
