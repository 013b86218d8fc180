"""One job for a name, on platforms that let several carry it: Hugging Face Jobs and SkyPilot.

If several jobs carry a name, the oldest is the job for everybody, and whoever sees the others ends them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors.base import Job, JobSpec, JobState, JobStatus, hides_secrets
from composer_prime.executors.repeating import repeated

LOOK_S = 1.0
"""Between two looks at a job whose log has no more lines yet."""


@dataclass(frozen=True)
class JobReport:
    """A job as its platform tells of it.

    age    what sorts jobs of a name, the oldest first: the time at which it was made, or its number
    page   where a person sees it
    """

    job: Job
    status: JobStatus
    age: float
    page: str


class UniqueJobs(ABC):
    """What an `Executor` does with jobs. How its platform is asked is left to the methods without a body."""

    platform: str
    confirm_s: float
    """For so long a cancelled job may go on before that is an error."""

    @abstractmethod
    def check(self, spec: JobSpec) -> None: ...

    @abstractmethod
    def log_in(self) -> None: ...

    @abstractmethod
    def _list(self, run: str, site: str | None, attempt: int | None) -> list[JobReport]:
        """Jobs of a run, those of one name where a site is given; others among them do no harm."""

    @abstractmethod
    def _by_id(self, id: str) -> JobReport | None:
        """The job of an id. None, or JobUnknown: there is none that we could have started."""

    @abstractmethod
    def _start(self, spec: JobSpec) -> list[JobReport]:
        """Start a job; what was told of it, if anything. A request that is repeated looks with `_settle` before."""

    @abstractmethod
    def _ask_end(self, job: Job) -> None:
        """Ask for a job's end, which comes later. A job that has just ended is no error."""

    @abstractmethod
    def _log_reader(self, job: Job, to_end: bool) -> Callable[[], Iterator[str]]:
        """What reads a job's log, again from its start each time, and gives the lines that it hasn't given yet.

        to_end   whether it waits for more lines until the job's end
        """

    @hides_secrets
    def submit(self, spec: JobSpec) -> Job:
        """Start the job, or return the one of its name."""
        self.check(spec)
        self.log_in()
        try:
            found = self._settle(spec) or self._settle(spec, *self._start(spec))
            if found is None:
                raise ExecutorError(f"{self.platform} accepted {spec.name}, and doesn't list it")
        except ExecutorError as error:
            raise type(error)(f"{error}: the job may have been started: launch again, which finds it") from error
        return found.job

    def find(self, run: str) -> list[Job]:
        """The run's jobs by site and attempt."""
        oldest = {(report.job.site, report.job.attempt): report.job for report in reversed(self._named(run))}
        return [oldest[place] for place in sorted(oldest)]

    def poll(self, job: Job) -> JobStatus:
        """How the job is now."""
        return self._look(job).status

    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        """The job's lines, standard output and error together."""
        state = self.poll(job).state
        read = self._log_reader(job, to_end=follow or state.final)
        while True:
            if state is not JobState.PENDING:
                yield from repeated(read)
            if state.final or not follow:  # asked before: what is read of an ended job is all there will be
                return
            time.sleep(LOOK_S)
            state = self.poll(job).state

    def cancel(self, job: Job) -> JobStatus:
        """End the job, and whatever else has its name."""
        status = self._end(self._look(job))
        for other in self._named(job.run, job.site, job.attempt):
            self._end(other)
        return status

    def _named(self, run: str, site: str | None = None, attempt: int | None = None) -> list[JobReport]:
        """The jobs of a run, or of one name, the oldest first."""
        found = [report for report in self._list(run, site, attempt) if report.job.run == run]
        if site is not None:
            found = [report for report in found if (report.job.site, report.job.attempt) == (site, attempt)]
        return sorted(found, key=_age)

    def _settle(self, spec: JobSpec, *started: JobReport) -> JobReport | None:
        """The oldest job of a name; the others are ended. None: there is none.

        started   jobs of the name that may not be listed yet
        """
        listed = self._named(spec.run, spec.site, spec.attempt)
        found = sorted({report.job: report for report in (*started, *listed)}.values(), key=_age)
        for other in found[1:]:
            self._end(other)
        return found[0] if found else None

    def _look(self, job: Job) -> JobReport:
        """What the platform tells of a job. Raises JobUnknown for another's id: a bucket may say anything."""
        report = self._by_id(job.id)
        if report is None or report.job != job:
            raise JobUnknown(f"{self.platform} has no job {job.id} of attempt {job.attempt} of {job.run} {job.site}")
        return report

    def _end(self, report: JobReport) -> JobStatus:
        """Cancel a job unless it has ended, and wait until it has."""
        status, deadline, pause_s = report.status, time.monotonic() + self.confirm_s, 0.1
        try:
            if not status.state.final:
                self._ask_end(report.job)
            while not status.state.final:
                if time.monotonic() > deadline:
                    raise ExecutorError(f"{status.message} {self.confirm_s:g} s after it was cancelled")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
                status = self.poll(report.job)
        except (ExecutorError, BadInput) as error:
            raise type(error)(
                f"{error}: job {report.job.id} may still run, and be billed: see {report.page}"
            ) from error
        return status


def _age(report: JobReport) -> tuple[float, str]:
    return report.age, report.job.id
