"""The ledger of an answers' folder: dollars reserved before a request is sent, settled after, never above a ceiling.

Each call has two lines of one shape: `reserved`, on the disk before the request leaves, and how it ended. A call
without the second line may have been paid for, so it keeps its reservation.
"""

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from composer_prime.errors import BadInput, ComposerPrimeError
from composer_prime.traces.ask.lines import LineWriter
from composer_prime.traces.ask.prices import nano_usd, usd

Outcome = Literal["reserved", "answered", "unusable", "refused", "lost"]
"""reserved: sent, and not yet known how it ended. answered, unusable: the teacher wrote something. refused: the server
said no, or wasn't reached; it costs nothing. lost: sent, and no answer came; it may have been paid for."""

DOUBT = 2
"""A call whose cost isn't known yet counts so many times against the ceiling: prices may have doubled."""


class CeilingReached(ComposerPrimeError):
    """A call doesn't fit below the ceiling, also when all that are in flight have been settled."""


@dataclass(frozen=True)
class Record:
    """One line of the ledger.

    call               unique: the question's key, and how often it was sent before
    prompt_tokens      cached ones included; None: the server didn't say
    completion_tokens  reasoning included
    usd_reserved       the most that the call could cost by the teachers' file
    usd_settled        what it did cost; None: not known
    latency_s          from request to answer
    """

    call: str
    key: str
    teacher: str
    model_requested: str
    usd_reserved: float
    outcome: Outcome = "reserved"
    model_used: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
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
        return dataclasses.replace(self, call="", latency_s=None)


def read_record(line: Mapping[str, Any]) -> Record:
    """A line of the ledger. Raises BadInput when it isn't one."""
    try:
        return Record(**line)
    except TypeError as error:
        raise BadInput(f"a line of the ledger isn't one of ours ({error}): restore it, or use another folder") from None


def last_records(records: Iterable[Record]) -> dict[str, Record]:
    """How each call stands, by call."""
    return {record.call: record for record in records}


class Ledger:
    """Who may spend. One process at a time has it, under the folder's lock.

    records  what the file holds so far
    ceiling  nano-dollars that settled and reserved never exceed together, those of earlier runs included
    """

    def __init__(self, writer: LineWriter, records: Iterable[Record], ceiling: int) -> None:
        self._writer = writer
        self._calls = last_records(records)
        self._times: dict[str, int] = {}
        self._settled = self._unsettled = 0
        for record in self._calls.values():
            self._times[record.key] = self._times.get(record.key, 0) + 1
            self._count(record)
        self._ceiling = ceiling
        self._num_in_flight = 0
        self._changed = asyncio.Condition()

    @property
    def records(self) -> tuple[Record, ...]:
        """How each call stands."""
        return tuple(self._calls.values())

    @property
    def committed(self) -> int:
        """Nano-dollars that are settled or reserved."""
        return self._settled + self._unsettled

    def needed(self, amount: int) -> int:
        """The least ceiling, in nano-dollars, under which a call of this worst case may be sent now."""
        return self._settled + DOUBT * (self._unsettled + amount)

    async def reserve(self, key: str, teacher: str, model: str, amount: int) -> Record:
        """Put down a call's worst case; the request may leave when this returns.

        It waits while calls in flight may still turn out cheaper. Raises CeilingReached.
        """
        async with self._changed:
            while self.needed(amount) > self._ceiling:
                if not self._num_in_flight:
                    raise CeilingReached(f"a call of up to ${usd(amount):g} doesn't fit below ${usd(self._ceiling):g}")
                await self._changed.wait()
            times = self._times[key] = self._times.get(key, 0) + 1
            record = Record(f"{key[:16]}-{times}", key, teacher, model, usd(amount))
            self._num_in_flight += 1
            self._write(record)
            return record

    async def close_call(self, record: Record) -> None:
        """Write down how a call ended that `reserve` began."""
        async with self._changed:
            self._num_in_flight -= 1
            self._write(record)
            self._changed.notify_all()

    def recover(self, kept: Mapping[str, Record]) -> None:
        """Close the calls that a killed process left: as `kept` has them by call, with an answer, else as lost."""
        for record in self.records:
            if record.outcome == "reserved":
                self._write(kept.get(record.call) or dataclasses.replace(record, outcome="lost"))

    def _write(self, record: Record) -> None:
        self._writer.append(dataclasses.asdict(record))
        if (before := self._calls.get(record.call)) is not None:
            self._count(before, -1)
        self._count(record)
        self._calls[record.call] = record

    def _count(self, record: Record, sign: int = 1) -> None:
        if record.usd_settled is None:
            self._unsettled += sign * nano_usd(record.usd_reserved)
        else:
            self._settled += sign * nano_usd(record.usd_settled)
