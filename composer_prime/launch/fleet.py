"""A launch's jobs on their platforms, through the records in the bucket: start, look, read logs, end.

Everything here works from the bucket alone, on any machine that has the platform's own credentials. What is to be done
next is decisions.py's to say.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import replace
from typing import cast

from composer_prime.errors import BadInput, JobUnknown
from composer_prime.executors.base import Executor, Job, JobSpec, JobState, JobStatus, Price, Secrets
from composer_prime.executors.open import Opener, open_executor
from composer_prime.launch import launch_keys
from composer_prime.launch.budget import ran_s
from composer_prime.launch.plan import LINKED, LaunchPlan
from composer_prime.launch.records import (
    Attempt,
    Ended,
    EndState,
    JobRecord,
    LaunchBook,
    StopState,
    begin_launch,
    newest_launch,
)
from composer_prime.store.base import Store
from composer_prime.visible import visible


class Stopped(BadInput):
    """Somebody stopped the launch, or one site of it: nothing of that is started any more."""


class Fleet:
    """One launch. Executors are opened when a record names their platform, and closed with the fleet.

    An attempt whose end was asked for and isn't confirmed comes back with a problem.

    clock   Unix seconds
    """

    def __init__(
        self, book: LaunchBook, *, opener: Opener = open_executor, clock: Callable[[], float] = time.time
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

    def spec(self, plan: LaunchPlan, site: str, attempt: int) -> JobSpec:
        """The job of one attempt of this launch, with all the time that the plan gives it."""
        return plan.spec(self.book.launch, site, attempt)

    def price(self, plan: LaunchPlan, spec: JobSpec) -> Price:
        """A job's cost, as the person said or its platform lists."""
        price = self.executor(plan.places[spec.site]).price(spec)
        said = plan.usd_per_hour
        return price if said is None else replace(price, usd_per_hour=said, source="--usd-per-hour")

    def start(self, plan: LaunchPlan, site: str, attempt: int, timeout_s: int) -> Job:
        """Have the job of one attempt of a site. Attempts before it that may run are ended first.

        timeout_s   that it gets, unless a record stands that gives it another

        Raises as `intend` and `submit`.
        """
        spec, on = self.spec(plan, site, attempt), plan.places[site]
        record = self.intend(on, spec, self.price(plan, spec), timeout_s)
        for earlier in self.book.attempts(site):
            if earlier.number < attempt and earlier.may_run and earlier.job is not None:
                with suppress(JobUnknown):
                    self.executor(earlier.record.on).cancel(earlier.job)
        self.book.keep(launch_keys.recipe, plan.recipe_text.encode())
        return self.submit(on, spec, record)

    def intend(self, on: str, spec: JobSpec, price: Price, timeout_s: int) -> JobRecord:
        """Write a job's record, unless one stands, which is returned.

        Raises Stopped; BadInput for what its platform would refuse, and for a record of another job, or of more time
        than `spec` has: whoever can write the bucket can write one.
        """
        executor = self.executor(on)
        executor.check(spec)
        self.refuse_stopped(spec.site)
        mine = JobRecord(
            on=on,
            spec=spec.sha256,
            timeout_s=timeout_s,
            overrun_s=price.overrun_s,
            usd_per_hour=price.usd_per_hour,
            secrets=tuple(spec.secrets),
            account=executor.account(),
            created_at=self.clock(),
        )
        found = self.book.intend(spec.site, spec.attempt, mine)
        same = (found.on, found.spec, found.account) == (mine.on, mine.spec, mine.account)
        if not same or found.timeout_s > spec.timeout_s:
            raise BadInput(
                f"{launch_keys.intent(self.book.launch.number, spec.site, spec.attempt)} is of another job than this "
                "launch plans, so it isn't started: if you began it, launch with the recipe, options and login of "
                f"then; else see who can write the bucket, and remove it or `composer-prime cancel "
                f"{self.book.store.uri}`: the next launch is a new one"
            )
        return found

    def submit(self, on: str, spec: JobSpec, record: JobRecord) -> Job:
        """Have the job of a record: the one that its platform has, or a new one.

        Raises Stopped; BadInput for what its platform refuses: what was written says so.
        """
        executor = self.executor(on)
        self._begun.append((spec.site, spec.attempt))
        try:
            if on in LINKED and spec.packages is not None:
                spec = replace(spec, secrets=spec.secrets.also(self.book.hand(spec.packages)))
            job = executor.submit(replace(spec, timeout_s=record.timeout_s))
        except BadInput as error:
            seen = self._ask(Attempt(spec.site, spec.attempt, record))
            if seen.is_only_meant or (seen.status is not None and seen.status.half_submitted):
                self.condemn(seen, "refused", str(error))
            raise
        self.book.start(job)
        try:
            self.refuse_stopped(spec.site)  # meanwhile somebody may have listed the jobs to end
        except Stopped:
            executor.cancel(job)
            raise
        return job

    def refuse_stopped(self, site: str | None = None) -> None:
        """Raise Stopped where somebody stopped the launch, or that site."""
        for each in dict.fromkeys((None, site)):
            if (stop := self.book.stopped(each)) is not None:
                what = f"{f'site {each} of ' if each else ''}launch {self.book.name}"
                raise Stopped(f"{what} was stopped on {stop.by}: nothing of it is started any more")

    def look(self, plan: LaunchPlan | None = None) -> list[Attempt]:
        """Every attempt: asked of its platform where it has no end yet. Nothing is written down.

        plan   what an intent names that is alone and of another place than planned isn't asked: it may be anybody's
        """
        planned = {} if plan is None else plan.places

        def is_asked(each: Attempt) -> bool:
            is_here = each.job is not None or planned.get(each.site, each.record.on) == each.record.on
            return each.ended is None and is_here

        return [self._ask(each) if is_asked(each) else each for each in self.book.attempts()]

    def _ask(self, attempt: Attempt, *, end: bool = False) -> Attempt:
        """An attempt with its job and its status, once it has been ended or as it is; or with an error."""
        attempt = replace(attempt, status=None, error=None)
        try:
            executor = self.executor(attempt.record.on)
            ask = executor.cancel if end else executor.poll
            if attempt.job is not None:
                with suppress(JobUnknown):  # its recorded name may be another's: that doesn't hide the job
                    return replace(attempt, status=ask(attempt.job))
            job = self._found(executor, attempt)
            return attempt if job is None else replace(attempt, job=job, status=ask(job))
        except Exception as error:  # also one that nobody foresaw: it is this attempt's alone
            return replace(attempt, error=error)

    def _found(self, executor: Executor, attempt: Attempt) -> Job | None:
        """The job that a platform has of an attempt; None: it has none.

        Raises JobUnknown where it may have one that this login doesn't see: once it had, or it was to be another's.
        """
        for job in executor.find(self.book.name):
            if (job.site, job.attempt) == attempt.place:
                return job
        if attempt.job is not None:
            raise JobUnknown(f"no job {attempt.job.id}")
        if (owner := attempt.record.account) != executor.account():
            raise JobUnknown(f"site {attempt.site} attempt {attempt.number} was to be a job of {owner}")
        return None

    def settle(self, attempt: Attempt) -> Attempt:
        """Write down the name of a job that was found, and the end of an attempt that has ended, or whose time has
        passed where nobody knows its job."""
        now, status, stop = self.clock(), attempt.status, attempt.stop
        if attempt.ended is not None:
            return replace(attempt, error=None) if attempt.is_unknown else attempt
        if attempt.job is not None and status is not None:
            self.book.start(attempt.job)
        if attempt.is_unknown and attempt.due < now:  # it may have run for all its time
            state, why, began = "lost", str(attempt.error), attempt.record.created_at
            status = JobStatus(JobState.FAILED, None, why, began, began + attempt.record.timeout_s)
        elif status is None or not status.state.final:
            return attempt
        elif status.state is JobState.CANCELLED and stop is not None:
            state, why = stop.state, stop.why
        else:
            state, why = status.state.value, status.message
        attempt = replace(attempt, status=status, error=None)
        ended = Ended(
            state=cast(EndState, state),
            exit_code=status.exit_code,
            seconds=ran_s(attempt, now),
            message=visible(why),
            ended_at=status.ended_at or now,
        )
        return replace(attempt, ended=self.book.end(attempt.site, attempt.number, ended))

    def condemn(self, attempt: Attempt, state: StopState, why: str) -> Attempt:
        """End an attempt as `state`, unless it was stopped already.

        That is written first, so that no other supervisor takes the end for somebody's cancel.
        """
        stop = attempt.stop or self.book.stop(attempt.site, attempt.number, state, why)
        return self._end(replace(attempt, stop=stop))

    def withdraw(self) -> Iterator[Attempt]:
        """End all that was started through this fleet at once."""
        begun = [each for each in self.book.attempts() if each.place in self._begun and each.ended is None]
        why = "its launch couldn't start all its sites"
        return _at_once(lambda each: self.condemn(each, "withdrawn", why), begun)

    def cancel(self, site: str | None = None) -> Iterator[Attempt]:
        """End the launch, or one site of it, all its jobs at once; each attempt as soon as it is known what came of it.

        The stop record is written first, which supervisors honour before and after they start anything. Raises BadInput
        for a site that the launch doesn't have.
        """
        self.book.attempts(site)
        self.book.stop(site)
        return _at_once(self._end, [each for each in self.book.attempts(site) if each.may_run])

    def _end(self, attempt: Attempt) -> Attempt:
        ended = self._ask(attempt, end=True)
        try:
            return self.settle(replace(ended, status=JobStatus(JobState.CANCELLED)) if ended.is_only_meant else ended)
        except Exception as error:  # also one that nobody foresaw: it is this attempt's alone
            return replace(ended, error=error)

    def logs(self, attempt: Attempt, *, follow: bool) -> Iterator[str]:
        """An attempt's log, without the values of its secrets that this process's environment has."""
        executor = self.executor(attempt.record.on)
        job = attempt.job or self._found(executor, attempt)
        if job is None:
            raise BadInput(f"attempt {attempt.number} of site {attempt.site} was never started: it has no log")
        known = {name: os.environ[name] for name in attempt.record.secrets if name in os.environ}
        return Secrets(known).redact_lines(executor.logs(job, follow=follow))


def begin_fleet(store: Store, run: str, *, opener: Opener = open_executor) -> Fleet:
    """The fleet of the run's newest launch that nobody stopped, or of a new one.

    Raises BadInput while jobs of a stopped launch may run: nobody would find them behind the new one.
    """
    if (before := newest_launch(store)) is not None and before.stopped() is not None:
        with closing(Fleet(before, opener=opener)) as old:
            left = [f"{each.site} attempt {each.number} ({each.problem})" for each in old.cancel() if each.problem]
        if left:
            raise BadInput(
                f"of the stopped launch {before.name} may still run: {'; '.join(left)}. End it first, by "
                f"`composer-prime cancel {store.uri}` where it was launched or in the platform's own console"
            )
    return Fleet(begin_launch(store, run), opener=opener)


def _at_once(act: Callable[[Attempt], Attempt], attempts: Sequence[Attempt]) -> Iterator[Attempt]:
    """The result of `act` for each, all at the same time, as it comes."""
    with ThreadPoolExecutor(max(1, len(attempts)), "composer-prime-cancel") as pool:
        for done in as_completed([pool.submit(act, attempt) for attempt in attempts]):
            yield done.result()
