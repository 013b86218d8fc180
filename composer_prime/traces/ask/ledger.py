"""The ledger of an answers' folder: dollars reserved before a request is sent, settled after, never above a ceiling.

Each call has a line `reserved`, on the disk before the request leaves, and one of how it ended. A call without the
second line may have been paid for, so it keeps its reservation: as `lost`, until a provider's usage record tells what
it cost, or it is released.
"""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from composer_prime.errors import BadInput, ComposerPrimeError
from composer_prime.traces.ask.lines import LineWriter
from composer_prime.traces.ask.prices import nano_usd, usd

Outcome = Literal["reserved", "answered", "unusable", "refused", "lost", "released"]
"""reserved: sent, and not yet known how it ended. answered, unusable: the teacher wrote something. refused: the server
said no, or wasn't reached; it costs nothing. lost: sent, and no answer came; it may have been paid for, and what it
cost may be told later. released: nobody told, and its reservation was given back."""

DOUBT = 2
"""A call whose cost isn't known yet counts so many times against the ceiling: prices may have doubled."""


class CeilingReached(ComposerPrimeError):
    """A call doesn't fit below the ceiling, also when all that are in flight have been settled."""


@dataclass(frozen=True)
class Record:
    """One line of the ledger.

    call                unique, also among folders: the server gets it as X-Request-Id
    key                 the question's
    at                  when it was reserved, in Unix seconds
    prompt_tokens       cached ones included; None: the server didn't say
    cache_write_tokens  of the prompt's, those that the server put into its cache
    completion_tokens   reasoning included
    usd_reserved        the most that the call could cost by the teachers' file
    usd_settled         what it did cost; None: not known
    latency_s           from request to answer
    """

    call: str
    key: str
    teacher: str
    model_requested: str
    usd_reserved: float
    outcome: Outcome = "reserved"
    at: float = 0.0
    model_used: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    usd_settled: float | None = None
    latency_s: float | None = None

    @property
    def has_answer(self) -> bool:
        """Whether the teacher wrote something, be it of use or not."""
        return self.outcome in ("answered", "unusable")

    def lasting(self) -> "Record":
        """Without what differs between two runs that get the same answer."""
        return dataclasses.replace(self, call="", at=0.0, latency_s=None)


def read_record(line: Mapping[str, Any]) -> Record:
    """A line of the ledger. Raises BadInput when it isn't one."""
    try:
        return Record(**line)
    except TypeError as error:
        raise BadInput(f"a line of the ledger isn't one of ours ({error}): restore it, or use another folder") from None


@dataclass
class Experience:
    """What the calls of one teacher and model came to, in all runs with a folder."""

    num_answers: int = 0
    num_usable: int = 0
    cost: int = 0
    latency_s: float = 0.0
    newest: Record | None = None


class Totals:
    """A ledger's sums, in nano-dollars, and the calls whose cost isn't known."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.settled = self.unsettled = 0
        self.unknown: dict[str, Record] = {}
        self._experiences: dict[tuple[str, str], Experience] = {}
        for record in records:
            self.add(record)

    @property
    def lost(self) -> list[Record]:
        """Calls that may have been paid for, and of which nobody waits for an answer."""
        return [record for record in self.unknown.values() if record.outcome == "lost"]

    def experience(self, teacher: str, model: str) -> Experience:
        """Of a teacher by its name and model."""
        return self._experiences.get((teacher, model)) or Experience()

    def add(self, record: Record) -> None:
        """Take one more line."""
        if (before := self.unknown.pop(record.call, None)) is not None:
            self.unsettled -= nano_usd(before.usd_reserved)
        if record.usd_settled is None:
            self.unsettled += nano_usd(record.usd_reserved)
            self.unknown[record.call] = record
            return
        self.settled += nano_usd(record.usd_settled)
        if record.has_answer:
            own = self._experiences.setdefault((record.teacher, record.model_requested), Experience())
            own.num_answers += 1
            own.num_usable += record.outcome == "answered"
            own.cost += nano_usd(record.usd_settled)
            own.latency_s += record.latency_s or 0
            own.newest = record


class Ledger:
    """Who may spend. One process at a time has it, under the folder's lock.

    totals   of what the file holds so far
    ceiling  nano-dollars that settled and reserved never exceed together, those of earlier runs included
    """

    def __init__(self, writer: LineWriter, totals: Totals, ceiling: int) -> None:
        self.totals = totals
        self.num_calls = 0
        self._writer = writer
        self._ceiling = ceiling
        self._num_in_flight = 0
        self._out: dict[str, Record] = {}
        self._changed = asyncio.Condition()

    @property
    def committed(self) -> int:
        """Nano-dollars that are settled or reserved."""
        return self.totals.settled + self.totals.unsettled

    def needed(self, amount: int) -> int:
        """The least ceiling, in nano-dollars, under which a call of this worst case may be sent now."""
        return self.totals.settled + DOUBT * (self.totals.unsettled + amount)

    async def reserve(self, key: str, teacher: str, model: str, amount: int) -> Record:
        """Put down a call's worst case; the request may leave when this returns.

        It waits while calls in flight may still turn out cheaper. Raises CeilingReached.
        """
        async with self._changed:
            while self.needed(amount) > self._ceiling:
                if not self._num_in_flight:
                    raise CeilingReached(f"a call of up to ${usd(amount):g} doesn't fit below ${usd(self._ceiling):g}")
                await self._changed.wait()
            call = f"{key[:16]}-{secrets.token_hex(6)}"
            record = Record(call, key, teacher, model, usd(amount), at=round(time.time(), 3))
            self._num_in_flight += 1
            self.num_calls += 1
            self._write(record)
        await self._writer.synced()
        return record

    def resumed(self, key: str) -> Record | None:
        """The call that an earlier process sent for this question, if its answer can still come."""
        if (record := self._out.pop(key, None)) is not None:
            self._num_in_flight += 1
        return record

    async def close_call(self, record: Record) -> None:
        """Write down how a call ended that `reserve` began, or `resumed` took up."""
        async with self._changed:
            self._num_in_flight -= 1
            self._write(record)
            self._changed.notify_all()

    async def leave_open(self) -> None:
        """Wait no more for a call of which the server can't be asked now: a later process takes it up."""
        async with self._changed:
            self._num_in_flight -= 1
            self._changed.notify_all()

    def settle_lost(self, record: Record, amount: int) -> None:
        """Write down what a lost call cost, as its provider tells."""
        self._write(dataclasses.replace(record, usd_settled=usd(amount)))

    def release(self, record: Record) -> None:
        """Give back what is reserved for a lost call."""
        self._write(dataclasses.replace(record, outcome="released", usd_settled=0.0))

    def recover(self, kept: Mapping[str, Record], out: Container[str]) -> None:
        """Close the calls that a killed process left: as `kept` has them by call, with an answer, else as lost.

        out  calls whose answers can still come: they stay open for `resumed`.
        """
        for record in list(self.totals.unknown.values()):
            if record.outcome != "reserved":
                continue
            if record.call in kept:
                self._write(kept[record.call])
            elif record.call in out:
                self._out[record.key] = record
            else:
                self._write(dataclasses.replace(record, outcome="lost"))

    def _write(self, record: Record) -> None:
        self._writer.write(vars(record))
        self.totals.add(record)
