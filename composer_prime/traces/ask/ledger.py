"""The ledger of an answers' folder: dollars reserved before a request is sent, settled after, never above a ceiling.

A call's row is `reserved`, on the disk before the request leaves, until it says how it ended. A call that a killed
process left `reserved` may have been paid for, so it keeps its reservation: as `lost`, until a provider's usage record
tells what it cost, or it is released.
"""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from composer_prime.traces.ask.database import Database, Statement
from composer_prime.traces.ask.prices import usd

Outcome = Literal["reserved", "answered", "unusable", "refused", "lost", "released"]
"""reserved: sent, and not yet known how it ended. answered, unusable: the teacher wrote something. refused: the server
said no, or wasn't reached; it costs nothing. lost: sent, and no answer came; it may have been paid for, and what it
cost may be told later. released: nobody told, and its reservation was given back."""

DOUBT = 2
"""A call whose cost isn't known yet counts so many times against the ceiling: prices may have doubled."""


@dataclass(frozen=True)
class Record:
    """One call.

    call                unique, also among folders: the server gets it as X-Request-Id
    key                 the question's
    reserved_nano_usd   the most that the call could cost by the teachers' file
    at                  when it was reserved, in Unix seconds
    prompt_tokens       cached ones included; None: the server didn't say
    cache_write_tokens  of the prompt's, those that the server put into its cache
    completion_tokens   reasoning included
    settled_nano_usd    what it did cost; None: not known
    latency_s           from request to answer
    """

    call: str
    key: str
    teacher: str
    model_requested: str
    reserved_nano_usd: int
    outcome: Outcome = "reserved"
    at: float = 0.0
    model_used: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    settled_nano_usd: int | None = None
    latency_s: float | None = None

    @property
    def usd_reserved(self) -> float:
        """`reserved_nano_usd` in dollars."""
        return usd(self.reserved_nano_usd)

    @property
    def usd_settled(self) -> float | None:
        """`settled_nano_usd` in dollars."""
        return None if self.settled_nano_usd is None else usd(self.settled_nano_usd)


class Experience(NamedTuple):
    """What the answers of one teacher and model came to, in all runs with a folder; their cost in nano-dollars."""

    num_answers: int
    num_usable: int
    cost: int
    latency_s: float
    newest: Record | None


_NAMES = [field.name for field in dataclasses.fields(Record)]
_INSERT = f"INSERT INTO calls ({', '.join(_NAMES)}) VALUES ({', '.join(f':{name}' for name in _NAMES)})"
_UPDATE = f"UPDATE calls SET {', '.join(f'{name} = :{name}' for name in _NAMES)} WHERE call = :call"


class Ledger:
    """Who may spend. One process at a time has it, under the folder's lock.

    ceiling             nano-dollars that settled and reserved never exceed together, those of earlier runs included
    settled, unsettled  nano-dollars: what calls did cost, and what is reserved for those of which that isn't known
    num_calls           reserved by this process
    """

    def __init__(self, database: Database, ceiling: int) -> None:
        self.num_calls = 0
        self._database = database
        self._ceiling = ceiling
        self._num_in_flight = 0
        self._out: dict[str, Record] = {}
        self._changed = asyncio.Event()
        sums = "COALESCE(SUM(settled_nano_usd), 0), COALESCE(SUM(reserved_nano_usd * (settled_nano_usd IS NULL)), 0)"
        ((self.settled, self.unsettled),) = database.rows(f"SELECT {sums} FROM calls")

    @property
    def committed(self) -> int:
        """Nano-dollars that are settled or reserved."""
        return self.settled + self.unsettled

    def records(self, where: str = "1", *values: str) -> Iterator[Record]:
        """How calls stand, in the order they were sent."""
        query = f"SELECT {', '.join(_NAMES)} FROM calls WHERE {where} ORDER BY rowid"
        return (Record(*row) for row in self._database.rows(query, *values))

    def lost(self) -> list[Record]:
        """Calls that may have been paid for, and of which nobody waits for an answer."""
        return list(self.records("outcome = 'lost' AND settled_nano_usd IS NULL"))

    def experience(self, teacher: str, model: str) -> Experience:
        """Of a teacher by its name and model."""
        own = "FROM calls WHERE teacher = ? AND model_requested = ? AND outcome IN ('answered', 'unusable')"
        sums = "COUNT(*), COALESCE(SUM(outcome = 'answered'), 0), COALESCE(SUM(settled_nano_usd), 0), TOTAL(latency_s)"
        (row,) = self._database.rows(f"SELECT {sums} {own}", teacher, model)
        newest = self.records(f"rowid = (SELECT MAX(rowid) {own})", teacher, model)
        return Experience(*row, newest=next(newest, None))

    def needed(self, amount: int) -> int:
        """The least ceiling, in nano-dollars, under which a call of this worst case may be sent now."""
        return self.settled + DOUBT * (self.unsettled + amount)

    async def reserve(self, key: str, teacher: str, model: str, amount: int) -> Record | None:
        """Put down a call's worst case; the request may leave when this returns.

        It waits while calls in flight may still turn out cheaper. None: it doesn't fit below the ceiling. Where an
        earlier process sent a call for this question whose answer can still come, that is taken up.
        """
        if (record := self._out.pop(key, None)) is not None:
            self._num_in_flight += 1
            return record
        while self.needed(amount) > self._ceiling:
            if not self._num_in_flight:
                return None
            await self._changed.wait()
        call = f"{key[:16]}-{secrets.token_hex(6)}"
        record = Record(call, key, teacher, model, amount, at=round(time.time(), 3))
        self._database.write((_INSERT, vars(record)))
        self._num_in_flight += 1
        self.num_calls += 1
        self.unsettled += amount
        await self._database.synced()
        return record

    def close_call(self, record: Record, *more: Statement) -> None:
        """Write down how a call ended that `reserve` gave, and more in the same commit, which begins now."""
        self.note(record, *more)
        self.leave_open()
        self._database.commit_soon()

    def leave_open(self) -> None:
        """Wait no more for a call of which the server can't be asked now: a later process takes it up."""
        self._num_in_flight -= 1
        self._changed.set()
        self._changed.clear()  # those that wait have been woken all the same

    def note(self, record: Record, *more: Statement) -> None:
        """Write down what became of a call whose cost wasn't known."""
        self._database.write((_UPDATE, vars(record)), *more)
        if record.settled_nano_usd is not None:
            self.unsettled -= record.reserved_nano_usd
            self.settled += record.settled_nano_usd

    def recover(self) -> None:
        """Take the calls that a killed process left for lost, but for those whose batch can still answer."""
        self._out = {record.key: record for record in self.records("outcome = 'reserved' AND batch IS NOT NULL")}
        self._database.write(("UPDATE calls SET outcome = 'lost' WHERE outcome = 'reserved' AND batch IS NULL", ()))
