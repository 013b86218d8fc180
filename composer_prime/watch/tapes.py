"""The sites' tapes, read back: what was offered, merged, carried and dropped, in the sites' own words."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from composer_prime.sync.records import MAX_COUNT


@dataclass
class TapeFacts:
    """What one site's tape says.

    offered    bytes of its payload by (fragment, version) of the round; 0 where it had nothing to offer
    dropped    tokens by fragment; summed
    faults     why a commit was void, by (fragment, version), where the site found one so
    problems   pieces and lines that aren't what a tape holds
    """

    offered: dict[tuple[int, int], int] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    faults: dict[tuple[int, int], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_tape(pieces: Iterable[tuple[str, bytes]]) -> TapeFacts:
    """The facts of one site's pieces of tape, (key, bytes) each. A bad line is a problem, and the others count."""
    facts = TapeFacts()
    for key, data in pieces:
        for number, line in enumerate(data.splitlines(), start=1):
            try:
                _take(facts, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
                facts.problems.append(f"{key} line {number} is no event ({type(error).__name__})")
    return facts


def count(value: Any) -> int:
    """The number that a tape says. Raises ValueError, TypeError or OverflowError for what counts nothing."""
    found = int(value)
    if not 0 <= found <= MAX_COUNT:
        raise ValueError(f"a count is from 0 to {MAX_COUNT}")
    return found


def _take(facts: TapeFacts, event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind not in ("offer", "dropped", "round"):
        return
    fragment, version = count(event["fragment"]), count(event["version"])
    if kind == "offer":
        facts.offered[fragment, version] = count(event["nbytes"]) if event["tokens"] else 0
    elif kind == "dropped":
        facts.dropped[fragment] = facts.dropped.get(fragment, 0) + count(event["tokens"])
    elif event["fault"] is not None:
        facts.faults[fragment, version] = str(event["fault"])
