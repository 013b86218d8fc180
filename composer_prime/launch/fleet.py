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
from composer_prime.executors.base import Executor, Job, JobState, JobStatus, KnowsAccount
from composer_prime.executors.open import open_executor
from composer_prime.executors.secrets import Secrets
from composer_prime.launch.budget import HOUR_S, price_of_job, ran_from
from composer_prime.launch.plan import LaunchPlan, other_than_planned, planned_intent, spec_of
from composer_prime.launch.records import (
    Attempt,
    Ended,
    EndState,
    Intent,
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

    def intent(self, plan: LaunchPlan, site: str, attempt: int, timeout_s: int) -> Intent:
        """What an attempt would be, not yet written down. Asks the platform for the price."""
        intent = planned_intent(plan, self.book.launch.number, site, attempt, timeout_s, self.clock())
        listed = self.executor(intent.on).price(spec_of(intent, self.book.name, plan))
        price = price_of_job(listed, plan.usd_per_hour)
        return intent.model_copy(update={"usd_per_hour": price.usd_per_hour, "overrun_s": price.overrun_s})

    def start(self, plan: LaunchPlan, site: str, attempt: int, timeout_s: int) -> Job:
        """Write the intent of an attempt, and submit its job. Attempts before it that may run are ended first.

        Raises Stopped and SiteStopped; BadInput for what the platform would refuse: then nothing was started, and what
        was written says so.
        """
        intent = self.intent(plan, site, attempt, timeout_s)
        executor = self.executor(intent.on)
        executor.check(spec_of(intent, self.book.name, plan))
        self._refuse_stopped(site)
        intent = intent.model_copy(update={"account": account_of(executor)})
        for earlier in by_site(self.book.attempts()).get(site, ()):
            job = earlier.job(self.book.name)
            if earlier.number < attempt and earlier.may_run and job is not None:
                with suppress(JobUnknown):
                    self.executor(earlier.intent.on).cancel(job)
        standing = self.book.intend(intent)
        if standing == intent:
            self._begun.append((site, attempt))
        return self.submit(plan, standing)

    def submit(self, plan: LaunchPlan, recorded: Intent) -> Job:
        """Have a recorded intent's job: the one that the platform has, or a new one, which is as `plan` says.

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

    def confirm(self, plan: LaunchPlan, recorded: Intent) -> Job | None:
        """None where a recorded intent is as `plan` says; else the job that the platform has of it nevertheless.

        Raises BadInput where it has none: whoever can write the bucket can write an intent, and none of theirs is run.
        """
        other = other_than_planned(recorded, self._planned(plan, recorded))
        if not other:
            return None
        executor = self.executor(plan.places[recorded.site].on)
        with suppress(JobUnknown):
            job = self._found(executor, Attempt(recorded, None, None))
            if job is not None and not executor.poll(job).half_submitted:
                return job
        key = launch_keys.intent(self.book.launch.number, recorded.site, recorded.attempt)
        raise BadInput(
            f"{key} {other}, so it isn't started: if you began it, launch with what it says; else see who can write "
            f"the bucket, and remove it or `composer-prime cancel {self.book.store.uri}`: the next launch is a new one"
        )

    def _planned(self, plan: LaunchPlan, recorded: Intent) -> Intent:
        return self.intent(plan, recorded.site, recorded.attempt, min(recorded.timeout_s, plan.timeout_s))

    def _submitted(self, plan: LaunchPlan, recorded: Intent) -> Job:
        executor = self.executor(plan.places[recorded.site].on)
        if may_be_hidden(executor, recorded):
            try:
                self._found(executor, Attempt(recorded, None, None))
            except JobUnknown as error:
                raise BadInput(f"{error}: launch with the login that began it, or cancel with that one") from error
        self.book.keep_recipe(plan.recipe_text)
        try:
            spec = spec_of(self._planned(plan, recorded), self.book.name, plan)
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

    def _note_refusal(self, executor: Executor, intent: Intent, error: BadInput) -> None:
        """Write down that the platform took no job of an intent, unless it has one or can't be asked."""
        attempt = Attempt(intent, None, None)
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
        """Whether an intent may have a job that this login doesn't see. No where its platform can't be asked."""
        try:
            self._found(self.executor(attempt.intent.on), attempt)
        except JobUnknown:
            return True
        except (BadInput, ExecutorError):
            return False
        return False

    def _see(self, attempt: Attempt) -> Seen:
        if attempt.ended is not None:
            return Seen(attempt)
        try:
            executor = self.executor(attempt.intent.on)
            job, status = self._polled(executor, attempt)
            if job is None:
                return Seen(attempt, problem=NOT_SUBMITTED)
            started = Started(site=job.site, attempt=job.attempt, platform=job.platform, id=job.id)
            return Seen(replace(attempt, started=started), status)
        except JobUnknown as error:
            return Seen(attempt, problem=str(error), unknown=True)
        except Exception as error:  # also one that nobody foresaw: it is this attempt's alone
            return Seen(attempt, problem=_spelled(error), refused=isinstance(error, BadInput))

    def _polled(self, executor: Executor, attempt: Attempt) -> tuple[Job | None, JobStatus | None]:
        """An attempt's job and how it is. A recorded name that is another's doesn't hide the job that it has."""
        recorded, unknown = attempt.job(self.book.name), None
        if recorded is not None:
            try:
                return recorded, executor.poll(recorded)
            except JobUnknown as error:
                unknown = error
        job = self._found(executor, attempt)
        if job is None and unknown is not None:
            raise unknown
        return job, None if job is None else executor.poll(job)

    def _found(self, executor: Executor, attempt: Attempt) -> Job | None:
        """The job of an intent whose launcher didn't come to write the id down. Raises JobUnknown where it may have
        one that this login doesn't see."""
        for job in executor.find(self.book.name):
            if (job.site, job.attempt) == (attempt.site, attempt.number):
                return job
        if may_be_hidden(executor, attempt.intent):
            owner = attempt.intent.account or f"the login on {attempt.intent.created_by}"
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
            condemned = attempt.verdict is not None and status.state is not JobState.SUCCEEDED
            state = attempt.verdict.state if attempt.verdict and condemned else end_state(status.state)
            why = attempt.verdict.why if attempt.verdict and condemned else status.message
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
        return self._end(replace(seen, attempt=self.book.condemn(seen.attempt, state, why)))

    def withdraw(self) -> Iterator[tuple[Seen, str]]:
        """End all that was started through this fleet at once; each attempt with "" where its end is confirmed."""
        why = "its launch couldn't start all its sites"
        begun = [each for each in self.book.attempts() if (each.site, each.number) in self._begun and not each.ended]
        yield from _at_once(lambda each: self._ended_now(self.book.condemn(each, "withdrawn", why)), begun)

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
        yield from _at_once(lambda each: self._end_lost(each) if each.ended else self._ended_now(each), running)

    def _ended_now(self, attempt: Attempt) -> tuple[Seen, str]:
        """End an attempt, without a look at it first where its job is known."""
        if (job := attempt.job(self.book.name)) is not None:
            with suppress(JobUnknown):  # a record may say anything
                status = self.executor(attempt.intent.on).cancel(job)
                return self.settle(Seen(attempt, status)), ""
        return self._end(self._see(attempt))

    def _end(self, seen: Seen) -> tuple[Seen, str]:
        attempt = seen.attempt
        job = attempt.job(self.book.name)
        if job is None and seen.problem == NOT_SUBMITTED:
            state, why = (attempt.verdict.state, attempt.verdict.why) if attempt.verdict else ("cancelled", "")
            ended = _unsubmitted(attempt, state, why, self.clock())
            self.book.end(ended)
            return Seen(replace(attempt, ended=ended)), ""
        if job is None and seen.unknown:
            settled = self.settle(seen)
            return (settled, "") if settled.attempt.ended else (seen, _not_found(attempt, seen.problem))
        if job is None:
            return seen, seen.problem
        try:
            return self.settle(replace(seen, status=self.executor(attempt.intent.on).cancel(job))), ""
        except JobUnknown as error:
            settled = self.settle(Seen(attempt, problem=str(error), unknown=True))
            return (settled, "") if settled.attempt.ended else (seen, _not_found(attempt, error))
        except Exception as error:  # also one that nobody foresaw
            return replace(seen, refused=isinstance(error, BadInput)), _spelled(error)

    def _end_lost(self, attempt: Attempt) -> tuple[Seen, str] | None:
        """End the job of an attempt that was given up for lost; None where it isn't there."""
        job = attempt.job(self.book.name)
        if job is None:
            return None
        try:
            self.executor(attempt.intent.on).cancel(job)
        except JobUnknown:
            return None
        return Seen(attempt), ""

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


def _at_once(
    act: Callable[[Attempt], tuple[Seen, str] | None], attempts: Sequence[Attempt]
) -> Iterator[tuple[Seen, str]]:
    """What `act` gives for each but None, all at the same time, as it comes; where it raises, what it said."""

    def guarded(attempt: Attempt) -> tuple[Seen, str] | None:
        try:
            return act(attempt)
        except Exception as error:
            return Seen(attempt), _spelled(error)

    with ThreadPoolExecutor(max(1, len(attempts)), "composer-prime-cancel") as pool:
        for done in as_completed([pool.submit(guarded, attempt) for attempt in attempts]):
            if (answer := done.result()) is not None:
                yield answer


def _spelled(error: Exception) -> str:
    return str(error) if isinstance(error, ComposerPrimeError) else f"{type(error).__name__}: {error}"


def account_of(executor: Executor) -> str:
    """Whose jobs it sees; "" where it doesn't know."""
    return executor.account() if isinstance(executor, KnowsAccount) else ""


def may_be_hidden(executor: Executor, intent: Intent) -> bool:
    """Whether a platform may have a job of an intent and not show it to this login."""
    if intent.account:
        return intent.account != account_of(executor)
    return intent.created_by != who()


def _not_found(attempt: Attempt, error: JobUnknown | str) -> str:
    until = datetime.fromtimestamp(attempt.due, UTC)
    return (
        f"{error}: not found with this login, so its end isn't confirmed: cancel where it was launched, or when its "
        f"time has passed ({until:%Y-%m-%d %H:%M} UTC)"
    )


def _lost(attempt: Attempt, message: str, now: float) -> Ended:
    """It may have run for all its time."""
    started_at = attempt.intent.created_at
    status = JobStatus(JobState.FAILED, None, message, started_at, min(now, started_at + attempt.intent.timeout_s))
    return _ended(attempt, status, "lost", message, now)


def _unsubmitted(attempt: Attempt, state: EndState, message: str, now: float) -> Ended:
    """The end of an attempt that no platform ever had."""
    return _ended(attempt, JobStatus(JobState.CANCELLED, None, message, None, now), state, message, now)


def _ended(attempt: Attempt, status: JobStatus, state: EndState, message: str, now: float) -> Ended:
    ended_at = now if status.ended_at is None else status.ended_at
    began = ran_from(status, attempt.intent.created_at)
    seconds = 0.0 if began is None else max(0.0, ended_at - began)
    price = attempt.intent.usd_per_hour
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
