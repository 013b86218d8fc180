"""What platforms behind a service share: refused requests made again, a choice of its machines, one job for a name.

If several jobs carry a name, the oldest is the job for everybody, and whoever sees the others ends them.
"""

import difflib
import logging
import re
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors.base import (
    Executor,
    Job,
    JobSpec,
    JobState,
    JobStatus,
    Resources,
    gpu_kinds,
    hides_secrets,
)
from composer_prime.plan.prices import Machine

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waited before a request is repeated."""
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Busy(ExecutorError):
    """A request that may succeed when it is repeated."""


def patiently(call: Callable[[], T]) -> T:
    """Make a request, and repeat it while it raises Busy."""
    return next(repeated(lambda: iter([call()])))


def repeated(read: Callable[[], Iterator[T]]) -> Iterator[T]:
    """All items of `read`, which is called again after it raised Busy and then gives those that it hasn't given yet.

    Raises ExecutorError when nothing new comes again and again.
    """
    failures = 0
    while True:
        try:
            for item in read():
                failures = 0
                yield item
            return
        except Busy as busy:
            if failures == len(PAUSES_S):
                raise ExecutorError(str(busy)) from busy
            log.info("repeating a request in_s=%.1f cause=%s", PAUSES_S[failures], busy)
            time.sleep(PAUSES_S[failures])
            failures += 1


def refusal(where: str, status: int, remedies: Mapping[int, str]) -> BadInput | ExecutorError:
    """The error that an HTTP status stands for: BadInput with its remedy, Busy, or another ExecutorError."""
    if status in remedies:
        return BadInput(f"{where}: {remedies[status]}")
    return Busy(where) if status in (408, 429) or status >= 500 else ExecutorError(where)


def first_line(text: str) -> str:
    """The first line of a service's words that isn't empty, without colors and its full stop."""
    plain = _ESCAPE.sub("", text)
    return next((line.strip().rstrip(".") for line in plain.splitlines() if line.strip()), "without a word")[:500]


def fitting(machines: Sequence[Machine], wanted: Resources, platform: str) -> list[Machine]:
    """The machines that have what is wanted, those with the first kind of GPU first; a name stands for one machine.

    platform   as people call it. Raises BadInput, with the nearest, for a GPU, a count or a size that it doesn't have
    """
    same = [each for each in machines if not each.gpu]
    if kinds := gpu_kinds(wanted):
        same = [each for kind in kinds for each in _with_gpus(machines, kind, wanted.gpu_count or 1, platform)]
    sizes = (
        (wanted.cpus or 0, "cpus", "CPUs"),
        (wanted.memory_gib or 0, "memory_gb", "GiB of memory"),
        (wanted.disk_gib or 0, "disk_gb", "GiB of disk"),
    )
    if found := [each for each in same if all(getattr(each, field) >= size for size, field, _ in sizes)]:
        return found
    asked = " and ".join(f"{size:g} {unit}" for size, _, unit in sizes if size)
    raise BadInput(f"{asked}: {platform} has no such machine, of {'; '.join(map(str, same))}: ask for less")


def cheapest(machines: Sequence[Machine], wanted: Resources, platform: str) -> Machine:
    """Of those that fit. Raises as `fitting`."""
    found = fitting(machines, wanted, platform)
    return min(found, key=lambda each: (each.usd_per_hour is None, each.usd_per_hour, each.cpus))


def _with_gpus(machines: Sequence[Machine], kind: str, count: int, platform: str) -> list[Machine]:
    asked = kind.replace(" ", "-").lower()
    same = [each for each in machines if each.gpu.lower() == asked]
    named = [each for each in machines if each.name.lower() == asked]
    if named and not same and count == 1:
        return named  # one machine, whatever the number of its GPUs
    if not (same := same or named):
        names = {name.lower(): name for each in machines for name in (each.name, each.gpu) if name}
        near = [names[each] for each in difflib.get_close_matches(asked, names, n=3, cutoff=0.5)]
        shown = f"nearest are {', '.join(near)}" if near else f"it has {', '.join(sorted(names.values())) or 'none'}"
        raise BadInput(f"{platform} has no GPU {kind!r}: {shown}")
    if found := [each for each in same if each.num_gpus == count]:
        return found
    counts = ", ".join(f"{each:g}" for each in sorted({each.num_gpus for each in same}))
    raise BadInput(f"{count} x {kind}: {platform} has machines with {counts} of them: ask for one")


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
