"""Hugging Face Jobs on this machine: what the service keeps, over jobs that are real processes.

Written from the client's source and the service's documentation. Where those are silent, the strict reading: labels
take no dots, a volume's bucket must exist, secrets are given back by name only.
"""

import itertools
import secrets
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from composer_prime.executors.base import Job
from composer_prime.executors.hf_jobs import HfJobsExecutor
from composer_prime.plan.prices import shipped
from tests.executors.loopback_hf_jobs_containers import Container
from tests.executors.loopback_hf_jobs_routes import TOKEN, USER, Faulty, HostedJob, Refused, routes
from tests.executors.platforms import Trouble
from tests.executors.stock_image import programs_of
from tests.servers.in_thread import serving_app

"""What jobs get that name none. Nothing is pulled: a job sees this machine's programs."""

_LABEL_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


@dataclass
class HfJobsPlatform:
    """The loopback, which serves from when it is made until `close`. What follows `retry_after` may be set any time."""

    folder: Path
    """Empty; what jobs write and what buckets hold is kept below."""
    name: str = "hf-jobs"
    has_requests: bool = True
    has_queue: bool = True
    keeps_caches: bool = True
    retry_after: str = "0"
    """What a 429 says."""
    stage_lag_s: float = 0.0
    blind_listings: int = 0
    """So many listings don't show jobs yet."""
    ignores_labels: bool = False
    """Listings aren't filtered, as by a service of an older day."""
    namespaces: set[str] = field(default_factory=lambda: {USER, "an-org"})
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of all requests, refused ones too."""
    url: str = ""

    def __post_init__(self) -> None:
        self.hosted: dict[str, HostedJob] = {}
        self.buckets: set[str] = set()
        self.troubles: deque[Trouble | None] = deque()
        self.is_closing = False
        self._mounts: list[Path] = []
        self._number = itertools.count(1)
        # Containers are found by their jobs' ids among all processes of this machine, where other loopbacks may run.
        self._own = secrets.token_hex(5)
        self._held: list[threading.Event] | None = None
        self._server = ExitStack()
        app = Faulty(Starlette(routes=routes(self)), self)
        self.url = f"http://127.0.0.1:{self._server.enter_context(serving_app(app))}"

    def executor(self) -> HfJobsExecutor:
        return HfJobsExecutor(endpoint=self.url, token=TOKEN)

    def environment(self) -> dict[str, str]:
        home = str(self.folder / "home")
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HOME": home, "HF_HUB_OFFLINE": "0"}

    def launch_option(self) -> str:
        return self.name

    def pids(self, job: Job) -> list[int]:
        return self._of(job).container.pids()

    def preempt(self, job: Job) -> None:
        container = self._of(job).container
        container.end("ERROR", "Job failed with exit code: 137. Reason: Evicted", grace_s=0)
        container.wait()

    def trouble(self, kind: Trouble, count: int) -> None:
        self.troubles.clear()
        self.troubles.extend(kind for _ in range(count))

    @contextmanager
    def hold_pending(self) -> Iterator[None]:
        self._held = held = []
        try:
            yield
        finally:
            self._held = None
            for may_start in held:
                may_start.set()

    def close(self) -> None:
        self.is_closing = True
        for hosted in self.hosted.values():
            hosted.container.end("CANCELED", None, grace_s=0)
        for hosted in self.hosted.values():
            hosted.container.wait()
        self._server.close()
        for mount in self._mounts:
            mount.unlink(missing_ok=True)

    def start(self, namespace: str, request: dict[str, Any]) -> HostedJob:
        """Accept a job, or refuse it as the service would."""
        _check(request, self.buckets)
        job = f"{int(time.time()):08x}{self._own}{next(self._number):06x}"
        may_start = threading.Event()
        if self._held is None:
            may_start.set()
        else:
            self._held.append(may_start)
        for volume in request.get("volumes", []):
            self._mount(volume)
        container = Container(
            job=job,
            command=[*request["command"], *request["arguments"]],
            env={
                **programs_of(request["dockerImage"], self.folder / "images" / job),
                **_BUILT_IN,
                **request["environment"],
                **request.get("secrets", {}),
            },
            folder=self.folder / "jobs" / job,
            timeout_s=request.get("timeoutSeconds", 30 * 60),
            may_start=may_start,
            stage_lag_s=self.stage_lag_s,
        )
        self.hosted[job] = HostedJob(job, namespace, request, datetime.now(UTC), container)
        return self.hosted[job]

    def _mount(self, volume: Mapping[str, Any]) -> None:
        """A link stands for a mount, since all jobs share one root here."""
        path = Path(volume["mountPath"])
        if not path.is_relative_to(tempfile.gettempdir()):
            raise Refused(400, f"this loopback mounts only below {tempfile.gettempdir()}, not at {path}")
        source = self.folder / "buckets" / volume["source"] / volume.get("path", "")
        source.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(source)
            self._mounts.append(path)

    def _of(self, job: Job) -> HostedJob:
        return self.hosted[job.id.rpartition("/")[2]]


_BUILT_IN = {"ACCELERATOR": "none", "CPU_CORES": "2", "MEMORY": "16Gi"}
"""What every job's environment holds, besides JOB_ID."""


def _check(request: Mapping[str, Any], buckets: set[str]) -> None:
    for key, value in request.get("labels", {}).items():
        if not _LABEL_CHARACTERS.issuperset(key + value):
            raise Refused(400, f'"labels.{key}" with value "{value}" fails to match the required pattern')
    if request["flavor"] not in {flavor.name for flavor in shipped("hf-jobs")}:
        raise Refused(400, f'"flavor" {request["flavor"]} is not one of the hardware flavors')
    if not (request.get("dockerImage") or request.get("spaceId")):
        raise Refused(400, '"dockerImage" is required')
    for volume in request.get("volumes", []):
        if volume["type"] == "bucket" and volume["source"] not in buckets:
            raise Refused(404, f"Bucket {volume['source']} not found")
