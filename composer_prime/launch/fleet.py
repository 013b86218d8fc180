"""A launch's jobs on their platforms, through the records in the bucket: start, look, read logs, end.

Everything here works from the bucket alone, on any machine that has the platform's own credentials. What is to be done
next is decisions.py's to say.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from composer_prime.errors import BadInput, ComposerPrimeError, ExecutorError, JobUnknown
from composer_prime.executors.base import Executor, Job, JobSpec, JobState, JobStatus, KnowsAccount, Price
from composer_prime.executors.open import open_executor
from composer_prime.executors.secrets import Secrets
from composer_prime.launch.budget import HOUR_S, price_of_job, ran_from
from composer_prime.launch.plan import LaunchPlan
from composer_prime.launch.records import (
    Attempt,
    Ended,
    EndState,
    JobRecord,
    LaunchBook,
    Started,
    Verdicted,
    begin_launch,
    by_site,
    end_state,
    one_line,
    who,
)
from composer_prime.store import launch_keys
from composer_prime.store.base import Store


@dataclass(frozen=True)
class Seen:
    """One attempt at one look.

    status    as its platform says; None where it has an end already, was never submitted, or gave no answer
    problem   why there is no answer
    refused   that the platform answered with a refusal, which the same request would meet again
    unknown   that the platform has no such job for this machine's login, though it gave the job a name once, or may
              have given it one to another login
    """

    attempt: Attempt
    status: JobStatus | None = None
    problem: str = ""
    refused: bool = False
    unknown: bool = False

    @property
    def place(self) -> tuple[str, int]:
        """(site, attempt)."""
        return self.attempt.site, self.attempt.number

    @property
    def state(self) -> str:
        """For people: the recorded end, else what the platform says."""
        if self.attempt.ended is not None:
            return self.attempt.ended.state
        if self.status is not None:
            return self.status.state.value
        return "unknown" if self.attempt.started or self.unknown else "not started"


NOT_SUBMITTED = "not submitted"


class Stopped(BadInput):
    """Somebody stopped the launch: nothing of it is started any more."""


class SiteStopped(BadInput):
    """Somebody stopped this one site of the launch: no attempt of it is started any more."""


class Fleet:
    """One launch. Executors are opened when a record names their platform, and closed with the fleet.

    clock   Unix seconds
    """

    def __init__(
        self,
        book: LaunchBook,
        *,
        opener: Callable[[str], Executor] = open_executor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.book = book
        self.clock = clock
        self._opener = opener
        self._executors: dict[str, Executor] = {}
        self._opening = threading.Lock()
        self._begun: list[tuple[str, int]] = []

    def executor(self, on: str) -> Executor:
        """The executor of a platform, as `--on` names it."""
        with self._opening:
            if on not in self._executors:
                self._executors[on] = self._opener(on)
            return self._executors[on]

    def close(self) -> None:
        """Let go of the platforms; jobs go on."""
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()

    # --- starting -----------------------------------------------------------------------------------------------------

    def spec(self, plan: LaunchPlan, site: str, attempt: int, timeout_s: int) -> JobSpec:
        """The job of one attempt of this launch."""
        return plan.spec(self.book.launch, site, attempt, timeout_s)

    def price(self, plan: LaunchPlan, spec: JobSpec) -> Price:
        """What a job costs, as the person said or its platform lists."""
        return price_of_job(self.executor(plan.places[spec.site].on).price(spec), plan.usd_per_hour)

    def record(self, spec: JobSpec, on: str, price: Price) -> JobRecord:
        """A job's record, not yet written down."""
        return JobRecord(
            site=spec.site,
            attempt=spec.attempt,
            on=on,
            spec=spec.sha256,
            timeout_s=spec.timeout_s,
            overrun_s=price.overrun_s,
            usd_per_hour=price.usd_per_hour,
            secrets=tuple(spec.secrets),
            account=account_of(self.executor(on)),
            created_at=self.clock(),
            created_by=who(),
        )

    def start(self, plan: LaunchPlan, site: str, attempt: int, timeout_s: int) -> Job:
        """Record an attempt, and submit its job. Attempts before it that may run are ended first.

        Raises Stopped and SiteStopped; BadInput for what the platform would refuse: then nothing was started, and what
        was written says so.
        """
        on = plan.places[site].on
        spec = self.spec(plan, site, attempt, timeout_s)
        price = self.price(plan, spec)
        self.executor(on).check(spec)
        self._refuse_stopped(site)
        record = self.record(spec, on, price)
        for earlier in by_site(self.book.attempts()).get(site, ()):
            job = earlier.job(self.book.name)
            if earlier.number < attempt and earlier.may_run and job is not None:
                with suppress(JobUnknown):
                    self.executor(earlier.record.on).cancel(job)
        standing = self.book.intend(record)
        if standing == record:
            self._begun.append((site, attempt))
        return self.submit(plan, standing)

    def submit(self, plan: LaunchPlan, recorded: JobRecord) -> Job:
        """Have a recorded job: the one that the platform has, or a new one, which is as `plan` says.

        Raises BadInput as `confirm` does.
        """
        self._refuse_stopped(recorded.site)
        job = self.confirm(plan, recorded) or self._submitted(plan, recorded)
        self.book.start(job)
        try:
            self._refuse_stopped(recorded.site)  # meanwhile somebody may have listed the jobs to end
        except (Stopped, SiteStopped):
            self.executor(recorded.on).cancel(job)
            raise
        return job

    def confirm(self, plan: LaunchPlan, recorded: JobRecord) -> Job | None:
        """None where a record is of the job that `plan` says; else the job that the platform has of it nevertheless.

        Raises BadInput where it has none: whoever can write the bucket can write a record, and none of theirs is run.
        """
        on, spec = self._planned(plan, recorded)
        if (recorded.on, recorded.spec) == (on, spec.sha256) and recorded.timeout_s <= plan.timeout_s:
            return None
        executor = self.executor(on)
        with suppress(JobUnknown):
            job = self._found(executor, Attempt(recorded, None, None))
            if job is not None and not executor.poll(job).half_submitted:
                return job
        key = launch_keys.intent(self.book.launch.number, recorded.site, recorded.attempt)
        raise BadInput(
            f"{key} is of another job than this launch plans, so it isn't started: if you began it, launch with the "
            f"recipe and options of then; else see who can write the bucket, and remove it or `composer-prime cancel "
            f"{self.book.store.uri}`: the next launch is a new one"
        )

    def _planned(self, plan: LaunchPlan, recorded: JobRecord) -> tuple[str, JobSpec]:
        spec = self.spec(plan, recorded.site, recorded.attempt, recorded.timeout_s)
        return plan.places[recorded.site].on, spec

    def _submitted(self, plan: LaunchPlan, recorded: JobRecord) -> Job:
        on, spec = self._planned(plan, recorded)
        executor = self.executor(on)
        if recorded.account != account_of(executor):
            try:
                self._found(executor, Attempt(recorded, None, None))
            except JobUnknown as error:
                raise BadInput(f"{error}: launch with the login that began it, or cancel with that one") from error
        self.book.keep_recipe(plan.recipe_text)
        try:
            if (linked := plan.places[recorded.site].linked) is not None:
                spec = replace(spec, secrets=spec.secrets.also(self.book.hand(linked)))
            return executor.submit(spec)
        except BadInput as error:
            self._note_refusal(executor, recorded, error)
            raise

    def _refuse_stopped(self, site: str) -> None:
        stop = self.book.stopped()
        if stop is not None:
            raise Stopped(f"launch {self.book.name} was stopped on {stop.by}: launch again to begin a new one")
        stop = self.book.stopped(site)
        if stop is not None:
            raise SiteStopped(
                f"site {site} of launch {self.book.name} was stopped on {stop.by}: it isn't started again"
            )

    def _note_refusal(self, executor: Executor, record: JobRecord, error: BadInput) -> None:
        """Write down that the platform took no job of a record, unless it has one or can't be asked."""
        attempt = Attempt(record, None, None)
        try:
            job = self._found(executor, attempt)
            if job is not None and not executor.poll(job).half_submitted:
                return
            if job is not None:
                executor.cancel(job)
        except (BadInput, ExecutorError):
            return
        self.book.end(_unsubmitted(attempt, "refused", str(error), self.clock()))

    # --- looking ------------------------------------------------------------------------------------------------------

    def look(self) -> list[Seen]:
        """Every attempt: asked of its platform where it has no end yet. Nothing is written down."""
        return [self._see(each) for each in self.book.attempts()]

    def is_hidden(self, attempt: Attempt) -> bool:
        """Whether an attempt may have a job that this login doesn't see. No where its platform can't be asked."""
        try:
            self._found(self.executor(attempt.record.on), attempt)
        except JobUnknown:
            return True
        except (BadInput, ExecutorError):
            return False
        return False

    def _see(self, attempt: Attempt) -> Seen:
        if attempt.ended is not None:
            return Seen(attempt)
        try:
            executor = self.executor(attempt.record.on)
            job, status = self._reach(executor, attempt, executor.poll)
            if job is None:
                return Seen(attempt, problem=NOT_SUBMITTED)
            started = Started(site=job.site, attempt=job.attempt, platform=job.platform, id=job.id)
            return Seen(replace(attempt, started=started), status)
        except JobUnknown as error:
            return Seen(attempt, problem=str(error), unknown=True)
        except Exception as error:  # also one that nobody foresaw: it is this attempt's alone
            return Seen(attempt, problem=_spelled(error), refused=isinstance(error, BadInput))

    def _reach(
        self, executor: Executor, attempt: Attempt, ask: Callable[[Job], JobStatus]
    ) -> tuple[Job | None, JobStatus | None]:
        """An attempt's job and what `ask` says of it. A recorded name that is another's doesn't hide the job."""
        recorded, unknown = attempt.job(self.book.name), None
        if recorded is not None:
            try:
                return recorded, ask(recorded)
            except JobUnknown as error:
                unknown = error
        job = self._found(executor, attempt)
        if job is None and unknown is not None:
            raise unknown
        return job, None if job is None else ask(job)

    def _found(self, executor: Executor, attempt: Attempt) -> Job | None:
        """The job of a record whose launcher didn't come to write the id down. Raises JobUnknown where it may have one
        that this login doesn't see."""
        for job in executor.find(self.book.name):
            if (job.site, job.attempt) == (attempt.site, attempt.number):
                return job
        if (owner := attempt.record.account) != account_of(executor):
            raise JobUnknown(f"site {attempt.site} attempt {attempt.number} was to be a job of {owner}")
        return None

    def settle(self, seen: Seen) -> Seen:
        """Write down the end of an attempt that has ended, or whose time has passed where nobody knows its job."""
        attempt, status = seen.attempt, seen.status
        if attempt.ended is not None:
            return seen
        if seen.unknown and attempt.due < self.clock():
            ended = _lost(attempt, seen.problem, self.clock())
        elif status is not None and status.state.final:
            itself = attempt.verdict is None or status.state is JobState.SUCCEEDED
            state, why = (end_state(status.state), status.message) if itself else _verdict_of(attempt)
            ended = _ended(attempt, status, state, why, self.clock())
        else:
            return seen
        self.book.end(ended)
        return Seen(replace(attempt, ended=ended))

    # --- ending -------------------------------------------------------------------------------------------------------

    def condemn(self, seen: Seen, state: Verdicted, why: str) -> tuple[Seen, str]:
        """End an attempt as `state`; "" where that is confirmed, else why it isn't.

        The verdict is written first, so that no other supervisor takes the end for somebody's cancel.
        """
        return self._end(self.book.condemn(seen.attempt, state, why))

    def withdraw(self) -> Iterator[tuple[Seen, str]]:
        """End all that was started through this fleet at once; each attempt with "" where its end is confirmed."""
        why = "its launch couldn't start all its sites"
        begun = [each for each in self.book.attempts() if (each.site, each.number) in self._begun and not each.ended]
        yield from _at_once(lambda each: self._end(self.book.condemn(each, "withdrawn", why)), begun)

    def cancel(self, site: str | None = None) -> Iterator[tuple[Seen, str]]:
        """End the launch, or one site of it, all its jobs at once; each attempt with what came of it, as it comes: ""
        where its end is confirmed.

        The stop record is written first, which supervisors honour before and after they start anything. Raises BadInput
        for a site that the launch doesn't have.
        """
        if site is not None:
            names = by_site(self.book.attempts())
            if site not in names:
                there = ", ".join(names) or "none yet"
                raise BadInput(f"launch {self.book.name} has no site {site} that could be ended: it has {there}")
        self.book.stop(site)
        running = [each for each in self.book.attempts() if site in (None, each.site) and each.may_run]
        for seen, problem in _at_once(self._end, running):
            if not (seen.unknown and seen.attempt.ended):  # given up for lost before, and still not there
                yield seen, problem

    def _end(self, attempt: Attempt) -> tuple[Seen, str]:
        try:
            executor = self.executor(attempt.record.on)
            job, status = self._reach(executor, attempt, executor.cancel)
            if job is not None:
                return self.settle(Seen(attempt, status)), ""
            if attempt.ended is not None:
                raise JobUnknown("it was given up for lost")
            ended = _unsubmitted(attempt, *_verdict_of(attempt), self.clock())
            self.book.end(ended)
            return Seen(replace(attempt, ended=ended)), ""
        except JobUnknown as error:
            seen = self.settle(Seen(attempt, problem=str(error), unknown=True))
            return seen, "" if seen.attempt.ended else _not_found(attempt, error)
        except Exception as error:  # also one that nobody foresaw: it is this attempt's alone
            return Seen(attempt, refused=isinstance(error, BadInput)), _spelled(error)

    # --- logs ---------------------------------------------------------------------------------------------------------

    def logs(self, attempt: Attempt, *, follow: bool, environment: Iterable[tuple[str, str]] = ()) -> Iterator[str]:
        """An attempt's log, without the values of its secrets that this machine knows."""
        job = attempt.job(self.book.name)
        executor = self.executor(attempt.record.on)
        job = job or self._found(executor, attempt)
        if job is None:
            raise BadInput(f"attempt {attempt.number} of site {attempt.site} was never started: it has no log")
        known = {name: value for name, value in environment if name in attempt.record.secrets}
        return Secrets(known).redact_lines(executor.logs(job, follow=follow))


def begin_fleet(store: Store, run: str, *, opener: Callable[[str], Executor] = open_executor) -> Fleet:
    """The fleet of the run's newest launch that nobody stopped, or of a new one.

    Raises BadInput while jobs of a stopped launch may run: nobody would find them behind the new one.
    """

    def clear(stopped: LaunchBook) -> None:
        old = Fleet(stopped, opener=opener)
        try:
            left = [f"{seen.attempt.site} attempt {seen.attempt.number} ({why})" for seen, why in old.cancel() if why]
        finally:
            old.close()
        if left:
            raise BadInput(
                f"of the stopped launch {stopped.name} may still run: {'; '.join(left)}. End it first, by "
                f"`composer-prime cancel {store.uri}` where it was launched or in the platform's own console"
            )

    return Fleet(begin_launch(store, run, clear), opener=opener)


def _at_once(act: Callable[[Attempt], tuple[Seen, str]], attempts: Sequence[Attempt]) -> Iterator[tuple[Seen, str]]:
    """What `act` gives for each, all at the same time, as it comes."""
    with ThreadPoolExecutor(max(1, len(attempts)), "composer-prime-cancel") as pool:
        for done in as_completed([pool.submit(act, attempt) for attempt in attempts]):
            yield done.result()


def _spelled(error: Exception) -> str:
    return str(error) if isinstance(error, ComposerPrimeError) else f"{type(error).__name__}: {error}"


def account_of(executor: Executor) -> str:
    """Whose jobs it sees: of the same account all do. This machine's, where the platform has no accounts."""
    return executor.account() if isinstance(executor, KnowsAccount) else who()


def _verdict_of(attempt: Attempt) -> tuple[EndState, str]:
    """As which end an attempt's end is written down when somebody here ends it, and why."""
    return ("cancelled", "") if attempt.verdict is None else (attempt.verdict.state, attempt.verdict.why)


def _not_found(attempt: Attempt, error: JobUnknown | str) -> str:
    until = datetime.fromtimestamp(attempt.due, UTC)
    return (
        f"{error}: not found with this login, so its end isn't confirmed: cancel where it was launched, or when its "
        f"time has passed ({until:%Y-%m-%d %H:%M} UTC)"
    )


def _lost(attempt: Attempt, message: str, now: float) -> Ended:
    """It may have run for all its time."""
    started_at = attempt.record.created_at
    status = JobStatus(JobState.FAILED, None, message, started_at, min(now, started_at + attempt.record.timeout_s))
    return _ended(attempt, status, "lost", message, now)


def _unsubmitted(attempt: Attempt, state: EndState, message: str, now: float) -> Ended:
    """The end of an attempt that no platform ever had."""
    return _ended(attempt, JobStatus(JobState.CANCELLED, None, message, None, now), state, message, now)


def _ended(attempt: Attempt, status: JobStatus, state: EndState, message: str, now: float) -> Ended:
    ended_at = now if status.ended_at is None else status.ended_at
    began = ran_from(status, attempt.record.created_at)
    seconds = 0.0 if began is None else max(0.0, ended_at - began)
    price = attempt.record.usd_per_hour
    return Ended(
        site=attempt.site,
        attempt=attempt.number,
        state=state,
        exit_code=status.exit_code,
        seconds=seconds,
        usd=None if price is None else seconds / HOUR_S * price,
        message=one_line(message),
        ended_at=ended_at,
    )
