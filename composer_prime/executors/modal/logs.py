"""A call's output on Modal as whole lines, from its start: read again and again while it grows.

Fetched by time range, which also works after the end and after a disconnect; entries that arrive late are found by
asking for the last seconds again.
"""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from composer_prime.errors import JobUnknown
from composer_prime.executors.modal.client import Connection

OVERLAP = timedelta(seconds=15)
"""How late an entry may arrive behind younger ones and still be found."""
AHEAD = timedelta(minutes=2)
"""How far Modal's clock may be ahead of ours."""


class LogReader:
    """Where one reader of one call's output stands."""

    def __init__(self, connection: Connection, job: str, call: Any) -> None:
        self._connection = connection
        self._job = job
        self._call = call
        self._newest: datetime | None = None
        self._seen: Counter[tuple[datetime, str]] = Counter()
        self._rest = ""

    def new_lines(self) -> Iterator[str]:
        """Lines that were completed since the last time."""
        for text in self._new_texts():
            *lines, self._rest = (self._rest + text).split("\n")
            yield from lines

    def last_line(self) -> Iterator[str]:
        """What stood after the last line's end, if anything."""
        if self._rest:
            yield self._rest
        self._rest = ""

    def _new_texts(self) -> list[str]:
        since = None if self._newest is None else self._newest - OVERLAP
        until = datetime.now(UTC) + AHEAD

        def fetch() -> list[Any]:
            return list(self._call.logs.fetch(since=since, until=until))

        try:
            entries = self._connection.ask(f"log of {self._job}", fetch)
        except JobUnknown:
            # Where Modal keeps logs a call is known a little later than where it keeps calls.
            return []
        found: Counter[tuple[datetime, str]] = Counter()
        texts = []
        for entry in entries:
            # Modal's own remarks ("system") are no output of the job.
            if entry.source == "system":
                continue
            key = (entry.timestamp, entry.message)
            found[key] += 1
            if found[key] > self._seen[key]:
                texts.append(entry.message)
        if found:
            self._newest = max(timestamp for timestamp, _ in found)
            self._seen = found
        return texts
