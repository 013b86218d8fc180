"""A SkyPilot API server on this machine: what it keeps of managed jobs, whose machines are real processes here.

Its answers have the shapes that the real server 0.14.1 gave, which tests/executors/recorded/sky holds. A job whose
machine is taken is started again by itself, as SkyPilot does it.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from starlette.applications import Starlette

from composer_prime.executors.base import Job
from composer_prime.executors.sky import RESOURCES_VARIABLE, SkyExecutor
from composer_prime.executors.sky_api import ENDPOINT_VARIABLE, TOKEN_VARIABLE
from tests.executors.loopback_hf_jobs_containers import Container
from tests.executors.loopback_hf_jobs_routes import Faulty
from tests.executors.loopback_sky_routes import Failed, routes
from tests.executors.platforms import Trouble
from tests.executors.stock_image import programs_of
from tests.servers.in_thread import serving_app

NO_TIME_OUT_S = 1e6
_NAME = re.compile(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*")
_EXIT_CODE = re.compile(r"exit code: (\d+)")


@dataclass
class ManagedJob:
    """A job as the server has it. `machines` are those it has had, the last one its present one."""

    number: int
    name: str
    submitted_at: float
    task: Mapping[str, Any]
    machines: list[Container] = field(default_factory=list)
    failure: tuple[str, str] | None = None
    """Status and reason of a job that got no machine."""
    is_stuck: bool = False
    """Its launch failed after it was written down."""
    is_cancelled: bool = False

    @property
    def status(self) -> str:
        if self.failure:
            return self.failure[0]
        if not self.machines:
            return "CANCELLED" if self.is_cancelled else "PENDING"
        machine = self.machines[-1]
        if self.is_cancelled:
            return "CANCELLED" if machine.is_final else "CANCELLING"
        waits = "PENDING" if len(self.machines) == 1 else "RECOVERING"
        return {"SCHEDULING": waits, "RUNNING": "RUNNING", "COMPLETED": "SUCCEEDED"}.get(machine.stage, "FAILED")

    @property
    def is_final(self) -> bool:
        return self.status in ("SUCCEEDED", "CANCELLED") or self.status.startswith("FAILED")

    def record(self) -> dict[str, Any]:
        """What the queue tells."""
        status, machine = self.status, self.machines[-1] if self.machines else None
        code = _EXIT_CODE.search((machine and machine.message) or "")
        reason = self.failure[1] if self.failure else None
        if status == "FAILED" and code:
            reason = (
                f"Job exited with exit code {code[1]} (user program failure). To see the details, run: sky jobs logs "
                f"--controller {self.number}"
            )
        started = next((each.started_at for each in self.machines if each.started_at), None)
        ended = machine.finished_at if machine and self.is_final else None
        return {
            "job_id": self.number,
            "task_id": 0,
            "job_name": self.name,
            "status": status,
            "schedule_state": "INACTIVE" if self.is_stuck else "DONE" if self.is_final else "ALIVE",
            "failure_reason": reason,
            "submitted_at": self.submitted_at,
            "start_at": started and started.timestamp(),
            "end_at": ended and ended.timestamp(),
        }


@dataclass
class SkyPlatform:
    """The loopback, which serves from when it is made until `close`. What follows `retry_after` may be set any time."""

    folder: Path
    name: str = "sky"
    has_requests: bool = True
    has_queue: bool = True
    keeps_caches: bool = False
    replaces_machines: bool = True
    retry_after: str = "0"
    api_version: int = 62
    user: dict[str, str] | None = None
    token: str | None = None
    """What requests must bear."""
    clouds: list[str] = field(default_factory=lambda: ["lambda"])
    has_catalog: bool = True
    fails_launches: bool = False
    """A launch writes its job down and fails then, as where rsync isn't installed."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """Those that were launched, as parsed."""
    url: str = ""

    def __post_init__(self) -> None:
        self.jobs: dict[int, ManagedJob] = {}
        self.results: dict[str, Any] = {}
        self.troubles: deque[Trouble | None] = deque()
        self.is_closing = False
        self._held: list[threading.Event] | None = None
        self._server = ExitStack()
        app = Faulty(Starlette(routes=routes(self)), self)  # type: ignore[arg-type]
        self.url = f"http://127.0.0.1:{self._server.enter_context(serving_app(app))}"

    def executor(self) -> SkyExecutor:
        return SkyExecutor(self.url, self.token, {})

    def environment(self) -> dict[str, str]:
        return {ENDPOINT_VARIABLE: self.url, TOKEN_VARIABLE: self.token or "", RESOURCES_VARIABLE: ""}

    def launch_option(self) -> str:
        return self.name

    def pids(self, job: Job) -> list[int]:
        return [pid for machine in self.jobs[int(job.id)].machines for pid in machine.pids()]

    def preempt(self, job: Job) -> None:
        managed = self.jobs[int(job.id)]
        machine = managed.machines[-1]
        managed.machines.append(self._machine(managed))
        machine.end("ERROR", "Job failed with exit code: 137. Reason: Evicted", grace_s=0)
        machine.wait()
        self._let_start(managed.machines[-1])

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
        for job in self.jobs.values():
            self.cancel(job)
        for machine in [machine for job in self.jobs.values() for machine in job.machines]:
            machine.wait()
        self._server.close()

    def launch(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take a job, or refuse it as the server would; what it returns are the jobs' ids, and a pickle."""
        task = yaml.safe_load(body["task"])
        if not isinstance(task.get("run"), str):
            raise Failed("InvalidSkyPilotConfigError", f"Invalid task YAML: {task.get('run')} is not of type 'string'.")
        if not _NAME.fullmatch(task["name"]):
            raise Failed("ValueError", f"Invalid task name {task['name']}.")
        job = ManagedJob(len(self.jobs) + 1, body["name"], time.time(), task)
        self.jobs[job.number] = job
        if self.fails_launches:
            job.is_stuck = True
            raise Failed("CommandError", f"Command rsync failed with return code 127.\nits task: {body['task']}")
        self.tasks.append(task)
        job.machines.append(self._machine(job))
        self._let_start(job.machines[-1])
        return {"job_id": [job.number], "handle": "gASV"}

    def cancel(self, job: ManagedJob) -> None:
        """As the server does it: a job that has ended stays as it is."""
        if not job.is_final:
            job.is_cancelled = True
            for machine in job.machines:
                machine.end("CANCELED", None)

    def _machine(self, job: ManagedJob) -> Container:
        place = f"{self.folder.name}-{id(self):x}-{job.number}-{len(job.machines)}"
        image = job.task.get("resources", {}).get("image_id", "").removeprefix("docker:")
        env = {**programs_of(image, self.folder / "images" / place), **job.task["envs"], **job.task["secrets"]}
        command = ["bash", "-c", job.task["run"]]
        return Container(place, command, env, self.folder / "jobs" / place, NO_TIME_OUT_S, threading.Event())

    def _let_start(self, machine: Container) -> None:
        if self._held is None:
            machine.may_start.set()
        else:
            self._held.append(machine.may_start)
