"""The records of a launch in the run's bucket, so that its jobs are found, watched and ended from any machine.

Every record is create-once, and its key says what it is of. An attempt to run a site has up to four:

    intent    before its job is submitted; a launcher killed in between leaves it alone, and the next one submits it
    job       the platform's name for its job
    stop      before it is ended, and why; a launch and a site may have one, too
    end       once nothing of it runs any more, as its platform confirms

Launchers read stop records before and after they submit, replicas when they start. No record holds a secret's value.

Whoever can write the bucket can write these records. So nothing that runs is taken from one (plan.py, `read_order`),
no job is believed to be an attempt's unless its platform says so, and every field has a kind and a size.
"""

import os
import re
import socket
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated, Literal, TypeVar, cast

from pydantic import Field

from composer_prime.config import PrimeRecipe, Recipe, any_from_data, run_uri
from composer_prime.config.toml import read_toml
from composer_prime.errors import BadInput, ComposerPrimeError, CorruptObject, JobUnknown, KeyMissing
from composer_prime.executors.base import Job, JobStatus
from composer_prime.executors.packages import Packages
from composer_prime.launch import launch_keys
from composer_prime.store import open_store
from composer_prime.store.base import Store
from composer_prime.store.obstore import ObjectStore
from composer_prime.sync.canonical import Record, sha256_hex
from composer_prime.sync.reading import read_bytes, read_record
from composer_prime.visible import visible

StopState = Literal["cancelled", "hung", "withdrawn", "refused"]
"""Why we end an attempt: a person asked; it hangs; not all its launch's sites could start; its platform took no job."""
EndState = Literal["succeeded", "failed", "preempted", "timed-out", "cancelled", "hung", "withdrawn", "refused", "lost"]
"""A job's final state, or a stop's. "lost", which nobody confirmed: no platform knows it, and its time has passed."""
LINK_S = 7 * 24 * 3600
"""For so long a job may wait for its machine and still find its wheels: the longest that S3 signs for."""

PRINTABLE = r"^[^\p{Cc}\p{Cf}\p{Zl}\p{Zp}]*$"
"""Without anything that a terminal obeys."""
Word = Annotated[str, Field(max_length=512, pattern=PRINTABLE)]
Line = Annotated[str, Field(max_length=4096, pattern=PRINTABLE)]
Seconds = Annotated[float, Field(ge=0, le=1e11)]
"""A duration, or a time of the writer (Unix). The largest is a date that there is, in the year 5138."""


class Launch(Record):
    """A run on platforms, from the first job until somebody stops it."""

    number: int = Field(ge=1, lt=10**launch_keys.LAUNCH_DIGITS)
    name: Word
    """The run's name on platforms: never used for another launch, whatever its run is called."""


class JobRecord(Record):
    """That one attempt to run a site is to be started. What is submitted is what the launcher plans itself."""

    on: Line
    """The platform as `launch --on` names it."""
    spec: str = Field(pattern=r"^[0-9a-f]{64}$")
    """`JobSpec.sha256`."""
    timeout_s: int = Field(ge=1, le=10**8)
    overrun_s: int = Field(default=0, ge=0, le=10**6)
    """Seconds beyond `timeout_s` for which the platform may bill."""
    usd_per_hour: float | None = Field(ge=0, le=1e5)
    secrets: tuple[Word, ...] = Field(max_length=256)
    """Names of the environment variables that are given as secrets."""
    account: Word
    """Whose job it is to be, as `Executor.account` tells."""
    created_at: Seconds


class Started(Record):
    """The platform's name for an attempt's job. It is a hint: the platform says whose job that is."""

    id: Word


class Stop(Record):
    """That a launch, a site or an attempt is to run no more, as which end that is written down, and why."""

    state: StopState = "cancelled"
    why: Line = ""
    by: Word


class Ended(Record):
    """How an attempt ended. seconds: that it ran."""

    state: EndState
    exit_code: int | None = Field(ge=-(2**31), le=2**32)
    seconds: Seconds
    message: Line
    ended_at: Seconds


R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Attempt:
    """One attempt to run a site: what the bucket holds of it, and at a look what its platform says.

    job      as its platform names it; None: no name was written down or found
    stop     that it is to run no more: its site's, else its own
    status   None where it has an end already, was never submitted, or its platform gave no answer
    error    why there is no answer. JobUnknown: its platform has no such job for this machine's login, though it gave
             one a name once, or may have given it to another login
    """

    site: str
    number: int
    record: JobRecord
    job: Job | None = None
    stop: Stop | None = None
    ended: Ended | None = None
    status: JobStatus | None = None
    error: Exception | None = None

    @property
    def place(self) -> tuple[str, int]:
        return self.site, self.number

    @property
    def state(self) -> str:
        """For people: the recorded end, else what the platform says."""
        if self.ended is not None:
            return self.ended.state
        if self.status is not None:
            return self.status.state.value
        return "not started" if self.is_only_meant else "unknown"

    @property
    def problem(self) -> str:
        """Why its platform's answer isn't known; "": it is."""
        if self.is_unknown:
            until = datetime.fromtimestamp(self.due, UTC)
            return (
                f"unknown to its platform with this login ({self.error}), so its end isn't confirmed: cancel where it "
                f"was launched, or when its time has passed ({until:%Y-%m-%d %H:%M} UTC)"
            )
        if self.error is None or isinstance(self.error, ComposerPrimeError):
            return str(self.error or "")
        return f"{type(self.error).__name__}: {self.error}"

    @property
    def is_unknown(self) -> bool:
        return isinstance(self.error, JobUnknown)

    @property
    def is_only_meant(self) -> bool:
        """Whether it has an intent and, as far as was looked, nothing else."""
        return self.job is None and self.ended is None and self.error is None and self.status is None

    @property
    def may_run(self) -> bool:
        """Whether its platform may still run it, as far as the records tell."""
        return self.ended is None or self.ended.state == "lost"

    @property
    def due(self) -> float:
        """Unix seconds by which its platform has ended it, if it started it at once."""
        return self.record.created_at + self.record.timeout_s + self.record.overrun_s


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

    def attempts(self, of_site: str | None = None) -> list[Attempt]:
        """All attempts there are, or those of one site, by site and number. Raises BadInput where it has none."""
        keys = set(self.store.list(launch_keys.launch_prefix(self.launch.number)))

        def found(kind: type[R], key: str) -> R | None:
            return self._record(kind, key) if key in keys else None

        attempts = []
        for number, site, attempt in sorted(place for key in keys if (place := launch_keys.parse_intent(key))):
            record = self._record(JobRecord, launch_keys.intent(number, site, attempt))
            started = found(Started, launch_keys.job(number, site, attempt))
            own, sites = (found(Stop, launch_keys.stop(number, site, each)) for each in (attempt, None))
            ended = found(Ended, launch_keys.end(number, site, attempt))
            platform = record.on.partition(":")[0]
            job = None if started is None else Job(platform, started.id, self.name, site, attempt)
            attempts.append(Attempt(site, attempt, record, job, sites or own, ended))
        mine = [each for each in attempts if of_site in (None, each.site)]
        if of_site is not None and not mine:
            there = ", ".join(by_site(attempts)) or "none yet"
            raise BadInput(f"launch {self.name} has no site {of_site}: it has {there}")
        return mine

    def refuse_ended(self, site: str, number: int) -> None:
        """Raise BadInput for an attempt that isn't to run: it, its site or its launch was ended, or nobody began it."""
        mine = {each.number: each for each in self.attempts(site)}.get(number)
        if mine is None:
            raise BadInput(f"launch {self.name} has no attempt {number} of site {site}: see `composer-prime ps`")
        if (stop := self.stopped() or mine.stop) is not None or mine.ended is not None:
            by = f"stopped on {stop.by}" if stop else "ended before its start"
            raise BadInput(f"attempt {number} of site {site} was {by}: it doesn't start")

    def intend(self, site: str, attempt: int, record: JobRecord) -> JobRecord:
        """Write a job's record; the one that stands, which may be another launcher's."""
        return self._written(launch_keys.intent(self.launch.number, site, attempt), record)

    def start(self, job: Job) -> None:
        """Write down a job's id."""
        self._written(launch_keys.job(self.launch.number, job.site, job.attempt), Started(id=job.id))

    def stop(
        self, site: str | None = None, attempt: int | None = None, state: StopState = "cancelled", why: str = ""
    ) -> Stop:
        """Say that this launch, one site or one attempt is to run no more; the record that stands."""
        key = launch_keys.stop(self.launch.number, site, attempt)
        return self._written(key, Stop(state=state, why=visible(why), by=socket.gethostname()))

    def stopped(self, site: str | None = None) -> Stop | None:
        """The stop record of this launch, or of one site, if there is one. Raises CorruptObject for a broken one."""
        try:
            return self._record(Stop, launch_keys.stop(self.launch.number, site))
        except KeyMissing:
            return None

    def end(self, site: str, attempt: int, ended: Ended) -> Ended:
        """Write down how an attempt ended; the record that stands."""
        return self._written(launch_keys.end(self.launch.number, site, attempt), ended)

    def keep(self, key_of: Callable[[str], str], data: bytes) -> str:
        """Store what is addressed by its sha256, which is returned. Raises as `kept`."""
        sha = sha256_hex(data)
        if not self.store.create(key_of(sha), data):
            self.kept(key_of, sha)
        return sha

    def kept(self, key_of: Callable[[str], str], sha: str) -> bytes:
        """The bytes stored with that sha256. Raises CorruptObject when other bytes stand there."""
        data = read_bytes(self.store, key_of(sha))
        if sha256_hex(data) != sha:
            raise CorruptObject(f"{key_of(sha)} is not what was launched: its sha256 differs")
        return data

    def hand(self, packages: Packages) -> dict[str, str]:
        """Store the wheels that a job is handed; the variables by which it finds them, for LINK_S. They are secrets.

        Raises BadInput for wheels that can't be made. The store must give links: `plan_launch` sees to it.
        """
        keys = [launch_keys.wheel(self.keep(launch_keys.wheel, wheel.data)) for wheel in packages.wheels()]
        store = cast(ObjectStore, self.store)
        return {name: store.presign_get(key, LINK_S) for name, key in zip(packages.links, keys, strict=True)}

    def clear(self) -> None:
        """Delete all that the store holds, for a launch in a folder of its own."""
        for key in self.store.list(""):
            self.store.delete(key)

    def _written(self, key: str, record: R) -> R:
        if key not in self._read:
            self.store.create(key, record.to_bytes())
        return self._record(type(record), key)

    def _record(self, kind: type[R], key: str) -> R:
        if key not in self._read:
            self._read[key] = read_record(self.store, kind, key)
        return cast(R, self._read[key])


def newest_launch(store: Store) -> LaunchBook | None:
    """The run's newest launch; None when there was none."""
    numbers = filter(None, map(launch_keys.parse_launch, store.list(launch_keys.launches_prefix())))
    newest = max(numbers, default=None)
    return None if newest is None else open_launch(store, newest)


def open_launch(store: Store, number: int | None = None) -> LaunchBook:
    """The run's newest launch, or the one of that number. Raises BadInput when there is none, CorruptObject for a
    record with the name of another run's: its jobs are none of this one's."""
    if number is None:
        if (book := newest_launch(store)) is not None:
            return book
        raise BadInput(
            f"{store.uri} holds no launch: start one with `composer-prime launch RECIPE --on ...`, or give the folder "
            "of a run that was launched"
        )
    key, run = launch_keys.launch(number), store.uri.rpartition("/")[2]
    try:
        launch = read_record(store, Launch, key)
    except KeyMissing:
        raise BadInput(f"{store.uri} holds no launch {number}: see `composer-prime ps`") from None
    if launch.number != number or not re.fullmatch(rf"{re.escape(run)}-[0-9a-f]{{8}}", launch.name):
        raise CorruptObject(
            f"{key} says launch {launch.number} and name {launch.name}, and no launch {number} of {run} is called so"
        )
    return LaunchBook(store, launch)


def begin_launch(store: Store, run: str) -> LaunchBook:
    """The run's newest launch that nobody stopped, or a new one: of several who begin, all get the same."""
    while (book := newest_launch(store)) is None or book.stopped() is not None:
        number = 1 if book is None else book.launch.number + 1
        launch = Launch(number=number, name=f"{run}-{os.urandom(4).hex()}")
        store.create(launch_keys.launch(number), launch.to_bytes())
    return book


def read_order(uri: str, launch: int, site: str, attempt: int, recipe_sha: str) -> Recipe | PrimeRecipe:
    """The recipe that a replica of the run at `uri` runs: the one whose sha256 its command line names.

    Raises BadInput as `refuse_ended`, and when the recipe is another run's; CorruptObject when its bytes in the bucket
    have another hash.
    """
    with closing(open_store(uri)) as store:
        book = open_launch(store, launch)
        book.refuse_ended(site, attempt)
        recipe = any_from_data(read_toml(book.kept(launch_keys.recipe, recipe_sha).decode()))
    if run_uri(recipe) != uri:
        raise BadInput(
            f"the recipe launched at {uri} is of the run at {run_uri(recipe)}: give the folder that was launched"
        )
    return recipe


def by_site(attempts: Iterable[Attempt]) -> dict[str, list[Attempt]]:
    """Attempts by site, of attempts in order of sites."""
    return {site: list(mine) for site, mine in groupby(attempts, lambda each: each.site)}
