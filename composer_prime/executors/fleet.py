"""A launch's jobs on their platforms, through the records in the bucket: start, look, read logs, end.

Everything here works from the bucket alone, on any machine that has the platform's own credentials. What is to be done
next is supervising.py's to say.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors.base import Executor, Job, JobState, JobStatus
from composer_prime.executors.budget import HOUR_S
from composer_prime.executors.launching import LaunchPlan, replica_command, spec_of
from composer_prime.executors.open import open_executor, with_file_of
from composer_prime.executors.records import (
    Attempt,
    Ended,
    EndState,
    Intent,
    LaunchBook,
    Started,
    by_site,
    end_state,
    who,
)
from composer_prime.executors.secrets import Secrets


@dataclass(frozen=True)
class Seen:
    """One attempt at one look.

    status    as its platform says; None where it has an end already, was never submitted, or gave no answer
    problem   why there is no answer
    """

    attempt: Attempt
    status: JobStatus | None = None
    problem: str = ""

    @property
    def state(self) -> str:
        """For people: the recorded end, else what the platform says."""
        if self.attempt.ended is not None:
            return self.attempt.ended.state
        if self.status is not None:
            return self.status.state.value
        return "unknown" if self.attempt.started else "not started"


NOT_SUBMITTED = "not submitted"


class Stopped(BadInput):
    """Somebody stopped the launch: nothing of it is started any more."""


class Fleet:
    """One launch. Executors are opened when a record names their platform, and closed with the fleet."""

    def __init__(self, book: LaunchBook, *, opener: Callable[[str], Executor] = open_executor) -> None:
        self.book = book
        self._opener = opener
        self._executors: dict[str, Executor] = {}

    def executor(self, on: str) -> Executor:
        """The executor of a platform, as `--on` names it."""
        if on not in self._executors:
            self._executors[on] = self._opener(on)
        return self._executors[on]

    def use_file_of(self, on: str) -> None:
        """Take the file that `on` names, "ssh:FILE", for jobs on its platform, whatever path their records have."""
        self._opener = with_file_of(on, self._opener)

    def close(self) -> None:
        """Let go of the platforms; jobs go on."""
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()

    # --- starting -----------------------------------------------------------------------------------------------------

    def intent(self, plan: LaunchPlan, site: str, attempt: int, timeout_s: int, recipe: str) -> Intent:
        """What an attempt would be, not yet written down. Asks the platform for the price."""
        resources = plan.resources
        intent = Intent(
            site=site,
            attempt=attempt,
            on=plan.on,
            recipe=recipe,
            command=replica_command(plan, site, attempt),
            timeout_s=timeout_s,
            usd_per_hour=plan.usd_per_hour,
            resources=vars(resources),
            image=plan.image,
            caches=dict(plan.caches),
            env=dict(plan.env),
            secrets=tuple(plan.secrets),
            created_at=time.time(),
            created_by=who(),
        )
        if plan.usd_per_hour is not None:
            return intent
        price = self.executor(plan.on).price(spec_of(intent, self.book.name, plan.secrets))
        return intent.model_copy(update={"usd_per_hour": price.usd_per_hour})

    def start(self, plan: LaunchPlan, site: str, attempt: int, timeout_s: int) -> Job:
        """Write the intent of an attempt, and submit its job. The attempt before it is ended first, whatever it does.

        Raises Stopped when somebody stopped the launch; BadInput for what the platform would refuse: then nothing was
        written and nothing started.
        """
        intent = self.intent(plan, site, attempt, timeout_s, self.book.keep_recipe(plan.recipe_text))
        self.executor(plan.on).check(spec_of(intent, self.book.name, plan.secrets))
        for earlier in by_site(self.book.attempts()).get(site, ()):
            if earlier.number < attempt and _may_run(earlier):
                self.confirm_killed(earlier)
        return self.submit(self.book.intend(intent), plan.secrets)

    def submit(self, intent: Intent, secrets: Secrets) -> Job:
        """Have an intent's job: the one that the platform has, or a new one."""
        self._refuse_stopped()
        executor = self.executor(intent.on)
        job = executor.submit(spec_of(intent, self.book.name, secrets))
        self.book.start(job)
        try:
            self._refuse_stopped()  # between our look and our job somebody may have listed the jobs to end
        except Stopped:
            executor.cancel(job)
            raise
        return job

    def _refuse_stopped(self) -> None:
        stop = self.book.stopped()
        if stop is not None:
            raise Stopped(f"launch {self.book.name} was stopped on {stop.by}: launch again to begin a new one")

    # --- looking ------------------------------------------------------------------------------------------------------

    def look(self, sites: Sequence[str] | None = None) -> list[Seen]:
        """Every attempt, of these sites alone where given: asked of its platform where it has no end yet."""
        return [self._see(each) for each in self.book.attempts() if sites is None or each.site in sites]

    def _see(self, attempt: Attempt) -> Seen:
        if attempt.ended is not None:
            return Seen(attempt)
        try:
            executor = self.executor(attempt.intent.on)
            job = attempt.job(self.book.name) or self._found(executor, attempt)
            if job is None:
                return Seen(attempt, problem=NOT_SUBMITTED)
            started = Started(site=job.site, attempt=job.attempt, platform=job.platform, id=job.id)
            return Seen(Attempt(attempt.intent, started, None), executor.poll(job))
        except JobUnknown as error:
            return Seen(attempt, _lost(attempt, error) if attempt.started else None, str(error))
        except (BadInput, ExecutorError) as error:
            return Seen(attempt, problem=str(error))

    def _found(self, executor: Executor, attempt: Attempt) -> Job | None:
        """The job of an intent whose launcher didn't come to write the id down."""
        for job in executor.find(self.book.name):
            if (job.site, job.attempt) == (attempt.site, attempt.number):
                self.book.start(job)
                return job
        return None

    def settle(self, seen: Seen) -> Seen:
        """Write down the end of an attempt that has ended."""
        if seen.attempt.ended is not None or seen.status is None or not seen.status.state.final:
            return seen
        lost = bool(seen.problem)
        ended = _ended(seen.attempt, seen.status, "lost" if lost else end_state(seen.status.state))
        self.book.end(ended)
        return Seen(Attempt(seen.attempt.intent, seen.attempt.started, ended))

    # --- ending -------------------------------------------------------------------------------------------------------

    def kill(self, attempt: Attempt, status: JobStatus, why: str) -> None:
        """End an attempt that hangs. The end is written first, so that no other supervisor takes it for somebody's
        cancel; `start` of the next attempt makes sure that the job is gone."""
        self.book.end(_ended(attempt, status, "hung", why))
        self.confirm_killed(attempt)

    def confirm_killed(self, attempt: Attempt) -> None:
        """Make sure that the job of an attempt that hung is gone; raises ExecutorError where it isn't."""
        job = attempt.job(self.book.name)
        if job is not None:
            with suppress(JobUnknown):
                self.executor(attempt.intent.on).cancel(job)

    def cancel(self, sites: Sequence[str] | None = None) -> Iterator[tuple[Seen, str]]:
        """End the launch, or these sites of it; each attempt with what came of it: "" where its end is confirmed.

        Without sites the stop record is written first, which supervisors honour before and after they start anything.
        """
        if sites is None:
            self.book.stop()
        for seen in self.look(sites):
            attempt = seen.attempt
            if not _may_run(attempt):
                continue
            job = attempt.job(self.book.name)
            if job is None:
                yield seen, "" if seen.problem == NOT_SUBMITTED else seen.problem
                continue
            try:
                status = self.executor(attempt.intent.on).cancel(job)
            except JobUnknown:
                yield self.settle(seen), ""
            except (BadInput, ExecutorError) as error:
                yield seen, str(error)
            else:
                yield self.settle(Seen(attempt, status)), ""

    # --- logs ---------------------------------------------------------------------------------------------------------

    def logs(self, attempt: Attempt, *, follow: bool, environment: Iterable[tuple[str, str]] = ()) -> Iterator[str]:
        """An attempt's log, without the values of its secrets that this machine knows."""
        job = attempt.job(self.book.name)
        executor = self.executor(attempt.intent.on)
        job = job or self._found(executor, attempt)
        if job is None:
            raise BadInput(f"attempt {attempt.number} of site {attempt.site} was never started: it has no log")
        known = {name: value for name, value in environment if name in attempt.intent.secrets}
        return Secrets(known).redact_lines(executor.logs(job, follow=follow))


def _may_run(attempt: Attempt) -> bool:
    """Whether the platform may still run it: a watchdog's verdict stands before the job is gone."""
    return attempt.ended is None or attempt.ended.state == "hung"


def _lost(attempt: Attempt, error: JobUnknown) -> JobStatus:
    return JobStatus(JobState.FAILED, None, str(error), attempt.intent.created_at, attempt.intent.created_at)


def _ended(attempt: Attempt, status: JobStatus, state: EndState, message: str = "") -> Ended:
    ended_at = time.time() if status.ended_at is None else status.ended_at
    seconds = 0.0 if status.started_at is None else max(0.0, ended_at - status.started_at)
    price = attempt.intent.usd_per_hour
    return Ended(
        site=attempt.site,
        attempt=attempt.number,
        state=state,
        exit_code=status.exit_code,
        seconds=seconds,
        usd=None if price is None else seconds / HOUR_S * price,
        message=message or status.message,
        ended_at=ended_at,
    )
