"""What a launch leaves in the run's bucket, so that its jobs are found, watched and ended from any machine.

Every record is create-once. A launch has a number, and its sites have attempts, each with up to four records:

    intent    before its job is submitted; a launcher killed in between leaves it alone, and the next one submits it
    job       the platform's name for its job
    verdict   before the launcher ends it, and why
    end       once nothing of it runs any more, as its platform confirms

A stop record, of the whole launch or of one site, stands before what it stops is ended; launchers read it before and
after they submit, replicas when they start. No secret is in any record, only their names.

Whoever can write the bucket can write these records. So nothing that runs is taken from one (plan.py, replica.py),
no job is believed to be an attempt's unless its platform says so, and every field has a kind and a size.
"""

import os
import re
import socket
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar, cast

from pydantic import Field

from composer_prime.config import PrimeRecipe, Recipe, any_from_data, run_uri
from composer_prime.errors import BadInput, CorruptObject, KeyMissing
from composer_prime.executors.base import Job, JobState
from composer_prime.executors.installing import link_names
from composer_prime.executors.packages import Packages
from composer_prime.store import launch_keys
from composer_prime.store.base import GivesLinks, Store
from composer_prime.sync.canonical import Record, sha256_hex
from composer_prime.sync.reading import read_bytes, read_record

Verdicted = Literal["hung", "withdrawn"]
"""Why a launcher ends an attempt: its beat stands still; its launch command couldn't start all that it was to start."""
EndState = Literal["succeeded", "failed", "preempted", "timed-out", "cancelled", "hung", "withdrawn", "refused", "lost"]
"""A job's final state, or a verdict's. "refused": the platform took no job. "lost": it knows none any more, and the
time that the job had has passed; that alone isn't confirmed."""
NOT_RUN = frozenset({"withdrawn", "refused"})
"""Ends of attempts that were no run of their site: a launch command that comes later starts the next, and no restart is
counted."""

LINK_S = 7 * 24 * 3600
"""For so long a job may wait for its machine and still find its wheels: the longest that S3 signs for."""

PRINTABLE = r"^[^\p{Cc}\p{Cf}\p{Zl}\p{Zp}]*$"
MAX_LINE = 4096
MAX_ITEMS = 256
Word = Annotated[str, Field(max_length=512, pattern=PRINTABLE)]
"""A name or an id, without anything that a terminal obeys."""
Line = Annotated[str, Field(max_length=MAX_LINE, pattern=PRINTABLE)]
"""A path, an argument or a message, likewise."""
Number = Annotated[int, Field(ge=1, le=10**launch_keys.LAUNCH_DIGITS - 1)]
"""Of a launch or an attempt, as keys hold it."""
Seconds = Annotated[float, Field(ge=0, le=1e11)]
"""A time or a duration. The largest is a date that there is, in the year 5138."""
UsdPerHour = Annotated[float, Field(ge=0, le=1e5)]


class Launch(Record):
    """A run on platforms, from the first job until somebody stops it."""

    number: Number
    name: Word
    """The run's name on platforms: never used for another launch, whatever its run is called."""
    created_at: Seconds
    created_by: Word


class OfAttempt(Record):
    """A record of one attempt: it is at that attempt's key."""

    site: Word
    attempt: Number


class JobRecord(OfAttempt):
    """That one attempt to run a site is to be started. Times are Unix seconds of the writer.

    What is submitted is what the launcher plans itself; a record of another job is refused.
    """

    on: Line
    """The platform as `launch --on` names it."""
    spec: str = Field(pattern=r"^[0-9a-f]{64}$")
    """`JobSpec.sha256`."""
    timeout_s: int = Field(ge=1, le=10**8)
    overrun_s: int = Field(default=0, ge=0, le=10**6)
    """Seconds beyond `timeout_s` for which the platform may bill."""
    usd_per_hour: UsdPerHour | None
    secrets: tuple[Word, ...] = Field(max_length=MAX_ITEMS)
    """Names of the environment variables that are given as secrets."""
    account: Word
    """Whose job it is to be, as `fleet.account_of` tells."""
    created_at: Seconds
    created_by: Word


class Started(OfAttempt):
    """The platform's name for an attempt's job. It is a hint: the platform says whose job that is."""

    platform: Word
    id: Word


class Verdict(OfAttempt):
    """That the launcher is ending an attempt, as which end it is to be written down, and why."""

    state: Verdicted
    why: Line
    at: Seconds
    by: Word


class Ended(OfAttempt):
    """How an attempt ended. seconds: that it ran; usd: what these cost, None where the price is unknown."""

    state: EndState
    exit_code: int | None = Field(ge=-(2**31), le=2**32)
    seconds: Seconds
    usd: float | None = Field(ge=0, le=1e13)
    message: Line
    ended_at: Seconds


class Stop(Record):
    """That nothing of a launch, or of one of its sites, is to run any more."""

    at: Seconds
    by: Word


R = TypeVar("R", bound=OfAttempt)


@dataclass(frozen=True)
class Attempt:
    """What the bucket holds of one attempt."""

    record: JobRecord
    started: Started | None
    ended: Ended | None
    verdict: Verdict | None = None

    @property
    def site(self) -> str:
        return self.record.site

    @property
    def number(self) -> int:
        return self.record.attempt

    @property
    def may_run(self) -> bool:
        """Whether its platform may still run it, as far as the records tell."""
        return self.ended is None or self.ended.state == "lost"

    @property
    def due(self) -> float:
        """Unix seconds by which its platform has ended it, if it started it at once."""
        return self.record.created_at + self.record.timeout_s + self.record.overrun_s

    def job(self, run: str) -> Job | None:
        """Its job, as its platform's executor knows it; None when no id was written down."""
        if self.started is None:
            return None
        return Job(self.started.platform, self.started.id, run, self.site, self.number)


class LaunchBook:
    """One launch's records. What was read once is not read again: records never change."""

    def __init__(self, store: Store, launch: Launch) -> None:
        self.store = store
        self.launch = launch
        self._read: dict[str, Record] = {}

    @property
    def name(self) -> str:
        """The run's name on platforms."""
        return self.launch.name

    def attempts(self) -> list[Attempt]:
        """All attempts there are, by site and number."""
        places: dict[tuple[str, int], set[str]] = {}
        for key in self.store.list(launch_keys.launch_prefix(self.launch.number)):
            parsed = launch_keys.parse_launched(key)
            if parsed is not None:
                places.setdefault(parsed[1:3], set()).add(parsed[3])
        found = []
        for (site, attempt), kinds in sorted(places.items()):
            place = (self.launch.number, site, attempt)
            record = self._record(JobRecord, launch_keys.intent(*place))
            started = self._record(Started, launch_keys.job(*place)) if "job" in kinds else None
            verdict = self._record(Verdict, launch_keys.verdict(*place)) if "verdict" in kinds else None
            ended = self._record(Ended, launch_keys.end(*place)) if "end" in kinds else None
            found.append(Attempt(record, started, ended, verdict))
        return found

    def attempt(self, site: str, number: int) -> Attempt:
        """One attempt. Raises BadInput when there is no intent for it."""
        for found in self.attempts():
            if (found.site, found.number) == (site, number):
                return found
        raise BadInput(f"launch {self.name} has no attempt {number} of site {site}: see `composer-prime ps`")

    def intend(self, record: JobRecord) -> JobRecord:
        """Write a job's record; the one that stands, which may be another launcher's."""
        key = launch_keys.intent(self.launch.number, record.site, record.attempt)
        self.store.create(key, record.to_bytes())
        return self._record(JobRecord, key)

    def start(self, job: Job) -> None:
        """Write down a job's id."""
        record = Started(site=job.site, attempt=job.attempt, platform=job.platform, id=job.id)
        self.store.create(launch_keys.job(self.launch.number, job.site, job.attempt), record.to_bytes())

    def condemn(self, attempt: Attempt, state: Verdicted, why: str) -> Attempt:
        """Write down that an attempt is being ended, and why; the attempt with the verdict that stands."""
        key = launch_keys.verdict(self.launch.number, attempt.site, attempt.number)
        verdict = Verdict(site=attempt.site, attempt=attempt.number, state=state, why=why, at=time.time(), by=who())
        self.store.create(key, verdict.to_bytes())
        return replace(attempt, verdict=self._record(Verdict, key))

    def end(self, ended: Ended) -> None:
        """Write down how an attempt ended, unless that stands already."""
        self.store.create(launch_keys.end(self.launch.number, ended.site, ended.attempt), ended.to_bytes())

    def stop(self, site: str | None = None) -> None:
        """Say that nothing of this launch, or of one site, is to run any more."""
        record = Stop(at=time.time(), by=who())
        self.store.create(launch_keys.stop(self.launch.number, site), record.to_bytes())

    def stopped(self, site: str | None = None) -> Stop | None:
        """Who stopped this launch, or that one site, if somebody did. Raises CorruptObject for what tells nobody."""
        try:
            return read_record(self.store, Stop, launch_keys.stop(self.launch.number, site))
        except KeyMissing:
            return None

    def stopped_sites(self) -> frozenset[str]:
        """The sites that were stopped one by one."""
        found = map(launch_keys.parse_site_stop, self.store.list(launch_keys.launch_prefix(self.launch.number)))
        return frozenset(place[1] for place in found if place is not None)

    def keep_recipe(self, text: str) -> None:
        """Store a recipe at its sha256. Raises CorruptObject when other bytes stand there."""
        self._keep(launch_keys.recipe, text.encode())

    def keep_order(self, text: str) -> str:
        """Store what a supervisor that is a job is to do; its sha256. Raises as `keep_recipe`."""
        return self._keep(launch_keys.order, text.encode())

    def _keep(self, key_of: Callable[[str], str], data: bytes) -> str:
        sha = sha256_hex(data)
        if not self.store.create(key_of(sha), data):
            self._kept(key_of, sha)
        return sha

    def _kept(self, key_of: Callable[[str], str], sha: str) -> bytes:
        data = read_bytes(self.store, key_of(sha))
        if sha256_hex(data) != sha:
            raise CorruptObject(f"{key_of(sha)} is not what was launched: its sha256 differs")
        return data

    def hand(self, packages: Packages) -> dict[str, str]:
        """Store the wheels that a job is handed; the variables by which it finds them, for LINK_S. They are secrets.

        Raises BadInput for wheels that can't be made. The store must give links: `plan_launch` sees to it.
        """
        links = {}
        for name, wheel in zip(link_names(packages), packages.wheels(), strict=True):
            key = launch_keys.wheel(self._keep(launch_keys.wheel, wheel.data))
            links[name] = cast(GivesLinks, self.store).presign_get(key, LINK_S)
        return links

    def recipe(self, sha: str, uri: str) -> Recipe | PrimeRecipe:
        """The recipe of that sha256, of the run at `uri`.

        Raises CorruptObject when other bytes stand there, BadInput when it is another run's.
        """
        recipe = any_from_data(tomllib.loads(self._kept(launch_keys.recipe, sha).decode()))
        if run_uri(recipe) != uri:
            raise BadInput(
                f"the recipe launched at {uri} is of the run at {run_uri(recipe)}: give the folder that was launched"
            )
        return recipe

    def order(self, sha: str) -> str:
        """The order of that sha256. Raises as `recipe`."""
        return self._kept(launch_keys.order, sha).decode()

    def _record(self, kind: type[R], key: str) -> R:
        found = self._read.get(key)
        if not isinstance(found, kind):
            found = read_record(self.store, kind, key)
            _, site, attempt, _ = launch_keys.parse_launched(key) or ("", "", 0, "")
            if (found.site, found.attempt) != (site, attempt):
                raise CorruptObject(f"{key} is of attempt {found.attempt} of site {found.site}, which has another key")
            self._read[key] = found
        return found


def newest_launch(store: Store) -> LaunchBook | None:
    """The run's newest launch; None when there was none."""
    numbers = [
        number
        for key in store.list(launch_keys.launches_prefix())
        if (number := launch_keys.parse_launch(key)) is not None
    ]
    if not numbers:
        return None
    return LaunchBook(store, _read_launch(store, max(numbers)))


def open_launch(store: Store, number: int | None = None) -> LaunchBook:
    """The run's newest launch, or the one of that number. Raises BadInput when there is none."""
    if number is not None:
        try:
            return LaunchBook(store, _read_launch(store, number))
        except KeyMissing:
            raise BadInput(f"{store.uri} holds no launch {number}: see `composer-prime ps`") from None
    book = newest_launch(store)
    if book is None:
        raise BadInput(
            f"{store.uri} holds no launch: start one with `composer-prime launch RECIPE --on ...`, or give the folder "
            "of a run that was launched"
        )
    return book


def _read_launch(store: Store, number: int) -> Launch:
    """The record of a launch. Raises CorruptObject for the name of another run's: its jobs are none of this one's."""
    key = launch_keys.launch(number)
    launch = read_record(store, Launch, key)
    run = store.uri.rpartition("/")[2]
    if launch.number != number or not re.fullmatch(rf"{re.escape(run)}-[0-9a-f]{{8}}", launch.name):
        raise CorruptObject(
            f"{key} says launch {launch.number} and name {launch.name}, and no launch {number} of {run} is called so"
        )
    return launch


def begin_launch(store: Store, run: str, clear: Callable[[LaunchBook], None] = lambda stopped: None) -> LaunchBook:
    """The run's newest launch that nobody stopped, or a new one: of several who begin, all get the same.

    clear   raises unless nothing of the stopped launch that comes before a new one runs any more
    """
    while True:
        book = newest_launch(store)
        if book is not None and book.stopped() is None:
            return book
        if book is not None:
            clear(book)
        number = 1 if book is None else book.launch.number + 1
        name = f"{run}-{os.urandom(4).hex()}"
        launch = Launch(number=number, name=name, created_at=time.time(), created_by=who())
        store.create(launch_keys.launch(number), launch.to_bytes())


def who() -> str:
    """This machine, for people who read records."""
    return socket.gethostname()


def one_line(text: str) -> str:
    """A platform's words as a record holds them."""
    return "".join(each if each.isprintable() else " " for each in text[:MAX_LINE])


def end_state(state: JobState) -> EndState:
    """A final state as an end record says it."""
    assert state.final, state
    return state.value  # type: ignore[return-value]


def by_site(attempts: Sequence[Attempt]) -> dict[str, list[Attempt]]:
    """Attempts by site, in order."""
    found: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        found.setdefault(attempt.site, []).append(attempt)
    return found
