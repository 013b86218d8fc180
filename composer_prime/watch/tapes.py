"""The sites' tapes, read back: what was offered, merged, carried and dropped, in the sites' own words."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import MAX_COUNT, MAX_RECORD_BYTES
from composer_prime.sync.reading import read_bytes
from composer_prime.sync.runtime import Runtime
from composer_prime.visible import visible
from composer_prime.waiting import Waiting

MAX_PROBLEMS = 3
"""Bad lines of one site's tape that are told, before the rest is counted."""
MAX_TAPE_BYTES, PIECES_AT_ONCE = 2**28, 8
"""Read of one site's tape, and held of it."""


@dataclass
class TapeFacts:
    """What one site's tape says.

    offered    bytes of its payload by (fragment, version) of the round; 0 where it had nothing to offer
    dropped    tokens by fragment; summed
    faults     why a commit was void, by (fragment, version), where the site found one so
    waits      the last wait that the site told of, and the incarnation that did
    traffic    (up, down) bytes by process: the most that it says, since each counts from its start
    problems   pieces and lines that aren't what a tape holds: the first few, and how many more
    """

    offered: dict[tuple[int, int], int] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    faults: dict[tuple[int, int], str] = field(default_factory=dict)
    waits: tuple[int, Waiting] | None = None
    traffic: dict[int, tuple[int, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def pieces_of(store: Store, site: str, runtime: Runtime) -> Iterator[tuple[str, bytes]]:
    """The pieces of one site's tape, (key, bytes) each; of one that is too long, a byte more than it may have."""
    listed = store.list(keys.tape_prefix(site))
    for start in range(0, len(listed), PIECES_AT_ONCE):
        some = listed[start : start + PIECES_AT_ONCE]
        yield from zip(some, runtime.map(partial(read_bytes, store), some), strict=True)


def read_tape(pieces: Iterable[tuple[str, bytes]]) -> TapeFacts:
    """The facts of one site's pieces of tape. A bad line is a problem, and the others count."""
    facts, bad, left = TapeFacts(), 0, MAX_TAPE_BYTES
    for key, data in pieces:
        left -= len(data)
        if left < 0 or len(data) > MAX_RECORD_BYTES:
            limits = f"at most {MAX_RECORD_BYTES} bytes a piece and {MAX_TAPE_BYTES} bytes in all"
            facts.problems.append(f"{key} and later pieces of that tape are not read: {limits}")
            break
        for number, line in enumerate(data.splitlines(), start=1):
            try:
                _take(facts, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
                bad += 1
                if bad <= MAX_PROBLEMS:
                    facts.problems.append(f"{key} line {number} is no event ({type(error).__name__})")
    if bad > MAX_PROBLEMS:
        facts.problems.append(
            f"{facts.problems[-1].partition(' ')[0]} and others: {bad - MAX_PROBLEMS:,} more such lines"
        )
    return facts


def count(value: Any) -> int:
    """The number that a tape says. Raises ValueError, TypeError or OverflowError for what counts nothing."""
    found = int(value)
    if not 0 <= found <= MAX_COUNT:
        raise ValueError(f"a count is from 0 to {MAX_COUNT}")
    return found


def _take(facts: TapeFacts, event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind == "waits":
        told = Waiting(visible(event["cause"]), count(event["since"]), event["until"] and count(event["until"]))
        if max(told.since, told.until or 0) > 2**36:
            raise ValueError("a date is before the year 4147")
        facts.waits = count(event["incarnation"]), told
    if "bytes_up" in event:
        process, up, down = (count(event[name]) for name in ("incarnation", "bytes_up", "bytes_down"))
        most_up, most_down = facts.traffic.get(process, (0, 0))
        facts.traffic[process] = max(most_up, up), max(most_down, down)
    if kind not in ("offer", "dropped", "round"):
        return
    fragment, version = count(event["fragment"]), count(event["version"])
    if kind == "offer":
        facts.offered[fragment, version] = count(event["nbytes"]) if event["tokens"] else 0
    elif kind == "dropped":
        facts.dropped[fragment] = facts.dropped.get(fragment, 0) + count(event["tokens"])
    elif event["fault"] is not None:
        facts.faults[fragment, version] = str(event["fault"])
