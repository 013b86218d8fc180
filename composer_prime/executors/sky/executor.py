"""Sites as SkyPilot's managed jobs: on its clouds, Kubernetes, Slurm and machines of one's own, recovered by itself.

A job that loses its machine is started again elsewhere by SkyPilot, as the same job and attempt, and goes on from the
bucket.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from typing import Any

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import Job, JobSpec, Price, hides_secrets, parse_name
from composer_prime.executors.choice import fitting
from composer_prime.executors.repeating import Busy
from composer_prime.executors.sky import task
from composer_prime.executors.sky.api import SkyApi
from composer_prime.executors.unique_jobs import JobReport, UniqueJobs
from composer_prime.plan.prices import Machine, listed, shipped

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
        task.check_task(spec)
        task.resources_of(spec, self._resources)
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
        return f"SkyPilot's ({self._api.shown}) by resources {json.dumps(task.resources_of(spec, self._resources))}"

    def price(self, spec: JobSpec) -> Price:
        """Of the dearest machine, by the server's catalog, else by the shipped table: SkyPilot goes on to dearer ones
        where the cheaper ones are out."""
        resources = task.resources_of(spec, self._resources)
        if (most := resources.get("max_hourly_cost")) is not None:
            return Price(float(most), "max_hourly_cost, above which SkyPilot takes no machine", task.OVERRUN_S)
        if spec.resources.gpu is None:
            return Price(None, "SkyPilot's API tells the price of no machine without a GPU", task.OVERRUN_S)
        if (known := self._known(spec)) is None:
            return self._stale_price(spec)
        infra = str(resources.get("infra", "")).partition("/")[0].lower().replace("k8s", "kubernetes")
        found = [each for each in fitting(known, spec.resources, WHERE) if infra in ("", "*", each.where)]
        if found and all(each.where in _OWN for each in found):
            return Price(0.0, "machines of your own", task.OVERRUN_S)
        usd = sorted(each.usd_per_hour for each in found if each.usd_per_hour is not None)
        catalog = f"SkyPilot's catalog at {self._api.shown}"
        if not usd:
            return Price(None, f"{catalog} has no price of it", task.OVERRUN_S)
        return Price(usd[-1], f"{catalog} ({date.today()}), from ${usd[0]:.2f} on: the dearest", task.OVERRUN_S)

    def _stale_price(self, spec: JobSpec) -> Price:
        usd = None
        with suppress(BadInput):  # which isn't all that SkyPilot has
            usd = max(each.usd_per_hour or 0.0 for each in fitting(shipped(PLATFORM), spec.resources, WHERE))
        source = f"stale, since the server tells no price: {listed(PLATFORM)[1]}"
        return Price(usd, source, task.OVERRUN_S, f"give max_hourly_cost in {task.RESOURCES_VARIABLE}")

    def close(self) -> None:
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
        return task.command_lines(self._api.log(int(job.id), follow=to_end))

    def _known(self, spec: JobSpec) -> list[Machine] | None:
        """The machines with GPUs of all clouds and regions; None: none is wanted, or the server tells of none."""
        if spec.resources.gpu:
            with suppress(ExecutorError, BadInput):
                self._api.health()  # one try, lest a dry run without a server waits
                if clouds := self._api.ask("/enabled_clouds"):
                    body = {"clouds": clouds, "require_price": False, "all_regions": True}
                    told = self._api.ask("/list_accelerators", body)
                    is_spot = bool(task.resources_of(spec, self._resources).get("use_spot"))
                    return [_machine_of(gpu, offer, is_spot) for gpu, offers in told.items() for offer in offers]
        return None


def _machine_of(gpu: str, offer: Sequence[Any], is_spot: bool) -> Machine:
    cloud, _, _, num_gpus, _, _, _, usd, spot_usd, _ = offer
    return Machine(gpu, gpu, num_gpus, spot_usd if is_spot else usd, where=cloud.lower())


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
