"""One job for a name, on platforms that let several carry it: Hugging Face Jobs and SkyPilot.

If several jobs carry a name, the oldest is the job for everybody, and whoever sees the others ends them.
"""

import re
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors.base import Executor, Job, JobSpec, JobState, JobStatus, hides_secrets
from composer_prime.executors.repeating import patiently, repeated

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


class UniqueJobs(Executor):
    """An executor's dealings with jobs. How its platform is asked is left to the abstract methods."""

    confirm_s: float
    """For so long a cancelled job may go on before that is an error."""

    @abstractmethod
    def _list(self, run: str, site: str | None, attempt: int | None) -> list[JobReport]:
        """Jobs of a run, those of one name where a site is given; others among them do no harm."""

    @abstractmethod
    def _by_id(self, id: str) -> JobReport | None:
        """The job of an id. None, or JobUnknown: there is none that we could have started."""

    @abstractmethod
    def _start(self, spec: JobSpec) -> list[JobReport]:
        """Start a job by one try; what was told of it, if anything."""

    @abstractmethod
    def _ask_end(self, job: Job) -> None:
        """Ask for a job's end, which comes later. A job that has just ended is no error."""

    @abstractmethod
    def _log(self, job: Job, to_end: bool) -> Iterator[tuple[str, str]]:
        """A job's lines from its log's start, each with its log's name: a machine that replaces one has another log.

        to_end   whether it waits for more lines until the job's end
        """

    @hides_secrets
    def submit(self, spec: JobSpec) -> Job:
        """Start the job, or return the one of its name. Each try looks first: the last one's answer may be lost."""
        self.check(spec)
        self.log_in()
        try:
            found = patiently(lambda: self._settle(spec) or self._settle(spec, *self._start(spec)))
            if found is None:
                raise ExecutorError(f"{self.platform} accepted {spec.name}, and doesn't list it")
        except ExecutorError as error:
            raise type(error)(f"{error}: the job may have been started: launch again, which finds it") from error
        return found.job

    def find(self, run: str) -> list[Job]:
        oldest = {(report.job.site, report.job.attempt): report.job for report in reversed(self._named(run))}
        return [oldest[place] for place in sorted(oldest)]

    def poll(self, job: Job) -> JobStatus:
        return self._look(job).status

    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        state, given = self.poll(job).state, Counter[str]()

        def new_lines() -> Iterator[str]:
            read = Counter[str]()
            for log, line in self._log(job, to_end=follow or state.final):
                read[log] += 1
                if read[log] > given[log]:
                    given[log] += 1
                    yield line

        while True:
            if state is not JobState.PENDING:
                yield from repeated(new_lines)
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
        """The platform's report of a job. Raises JobUnknown for another's id: a bucket may say anything."""
        report = self._by_id(job.id)
        if report is None or report.job != job:
            raise JobUnknown(f"{self.platform} has no job {job.id} of attempt {job.attempt} of {job.run} {job.site}")
        return report

    def _end(self, report: JobReport) -> JobStatus:
        return end_job(report.job, report.status, self._ask_end, self.poll, self.confirm_s, report.page)


def end_job(
    job: Job,
    status: JobStatus,
    ask: Callable[[Job], None],
    poll: Callable[[Job], JobStatus],
    confirm_s: float,
    page: str,
) -> JobStatus:
    """Ask for a job's end unless it has ended, and wait until it has. An error says that it may still be billed."""
    deadline, pause_s = time.monotonic() + confirm_s, 0.1
    try:
        if not status.state.final:
            ask(job)
        while not status.state.final:
            if time.monotonic() > deadline:
                raise ExecutorError(f"{status.message} {confirm_s:g} s after it was cancelled")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)
            status = poll(job)
    except (ExecutorError, BadInput) as error:
        raise type(error)(f"{error}: job {job.id} may still run, and be billed: see {page}") from error
    return status


def told_exit_code(said: str) -> int | None:
    """The exit code in a platform's words; above 128 it stands for a signal, as shells and containers have it."""
    match = re.search(r"exit code:? (\d+)", said, re.IGNORECASE)
    code = int(match[1]) if match else None
    return 128 - code if code and 128 < code <= 192 else code


def _age(report: JobReport) -> tuple[float, str]:
    return report.age, report.job.id
