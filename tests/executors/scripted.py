"""A platform in memory whose jobs do what a test says: for what stands above executors, where no process is needed."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from composer_prime.errors import ExecutorError, JobUnknown
from composer_prime.executors.base import Executor, Job, JobSpec, JobState, JobStatus, Price, check_names

CANCELLED = JobStatus(JobState.CANCELLED, ended_at=1.0, started_at=0.0)


@dataclass
class ScriptedPlatform(Executor):
    """Jobs by id; a test sets what `poll` answers. fail: the next calls raise ExecutorError."""

    platform: str = "local"
    usd_per_hour: float | None = 0.0
    overrun_s: int = 0
    unbounded: str = ""
    jobs: dict[str, tuple[JobSpec, JobStatus]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    fail: int = 0
    on_submit: list = field(default_factory=list)

    def check(self, spec: JobSpec) -> None:
        check_names(spec)

    def credentials(self) -> dict[str, str]:
        return {"MOON_TOKEN": "very-secret-moon-token"}

    def machine(self, spec: JobSpec) -> str:
        return "one on the moon"

    def price(self, spec: JobSpec) -> Price:
        return Price(self.usd_per_hour, "the test", self.overrun_s, self.unbounded)

    def submit(self, spec: JobSpec) -> Job:
        self._answer()
        if spec.name not in self.jobs:
            self.jobs[spec.name] = (spec, JobStatus(JobState.RUNNING, started_at=time.time()))
        for act in self.on_submit:
            act()
        return self._job(spec)

    def find(self, run: str) -> list[Job]:
        self._answer()
        return [self._job(spec) for spec, _ in self.jobs.values() if spec.run == run]

    def poll(self, job: Job) -> JobStatus:
        self._answer()
        return self._known(job)[1]

    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        self._known(job)
        return iter(self.lines)

    def cancel(self, job: Job) -> JobStatus:
        self._answer()
        spec, status = self._known(job)
        if not status.state.final:
            self.cancelled.append(job.id)
            self.jobs[job.id] = (spec, CANCELLED)
        return self.jobs[job.id][1]

    def ends(self, job_id: str, state: JobState, exit_code: int | None = None, seconds: float = 60.0) -> None:
        """Let a job end."""
        now = time.time()
        self.jobs[job_id] = (self.jobs[job_id][0], JobStatus(state, exit_code, "", now - seconds, now))

    def _job(self, spec: JobSpec) -> Job:
        return Job(self.platform, spec.name, spec.run, spec.site, spec.attempt)

    def _known(self, job: Job) -> tuple[JobSpec, JobStatus]:
        if job.id not in self.jobs or job != self._job(self.jobs[job.id][0]):
            raise JobUnknown(f"no job {job.id}")
        return self.jobs[job.id]

    def _answer(self) -> None:
        if self.fail:
            self.fail -= 1
            raise ExecutorError("the platform is down")
