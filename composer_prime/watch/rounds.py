"""A fragment's rounds, read from commits and listings: who was taken, what was void, what was refused and why; and
the sites' tapes, read back: what was offered, merged, carried and dropped, in the sites' own words.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low
from typing import Any, TypeVar

from composer_prime.errors import CorruptObject, KeyMissing
from composer_prime.outer.master_header import HEADER_BYTES, read_header
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import MAX_COUNT, MAX_RECORD_BYTES, Record
from composer_prime.sync.reading import read_bytes, read_record
from composer_prime.sync.records import Commit, Offer, Part, Taken
from composer_prime.sync.roster import Roster
from composer_prime.sync.runtime import Runtime
from composer_prime.visible import visible
from composer_prime.waiting import Waiting

R = TypeVar("R", bound=Record)

MAX_VALUE_BYTES = 8
"""More than any codec takes for a value: a size beyond that is claimed, and there is no such payload."""

MAX_PARTS = 1024
"""A payload has no more slices, and a round no more parts than slices; a commit may claim any number."""

MAX_LINES = 3
"""Bad lines of one site's tape that are told, before the rest is counted."""
MAX_TAPE_BYTES, PIECES_AT_ONCE = 2**28, 8
"""Read of one site's tape, and held of it."""

_DETAIL = re.compile(r"\b[0-9a-f]{8,}\b|\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b|\S*/\S*")


@dataclass
class FragmentRounds:
    """What the bucket holds of one fragment's rounds.

    version     rounds closed
    commits     by round; a round whose commit can't be read, or was made by none who may commit, has none
    void        rounds that merged nothing; `faulty` of them because of an unsound commit
    offers      sites that have an offer, by round, as far as offers are kept
    """

    fragment: int
    version: int = 0
    commits: dict[int, Commit] = field(default_factory=dict)
    void: set[int] = field(default_factory=set)
    faulty: set[int] = field(default_factory=set)
    offers: dict[int, set[str]] = field(default_factory=dict)
    snapshots: list[int] = field(default_factory=list)
    snapshot_bytes: int = 0
    merged_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def taken(self, version: int) -> tuple[Taken, ...]:
        """What a closed round merged."""
        return () if version in self.void or version not in self.commits else self.commits[version].taken

    def refused(self) -> Counter[str]:
        """Offers that commits left out, by reason without its numbers."""
        return Counter(
            reason(entry.why)
            for version, commit in self.commits.items()
            if version not in self.faulty
            for entry in commit.refused
        )


def believed(rounds: FragmentRounds, site: str, roster: Roster) -> tuple[int, int]:
    """(merged, trained) tokens that are believed of a guest at most: what the middle one of the members trained in the
    rounds since it was taken before, and in all since the first that took it, with the open one."""
    usual, first, since, merged = [], rounds.version, 0, 0
    for version in range(rounds.version):
        tokens = {entry.site: entry.tokens for entry in rounds.taken(version)}
        guests = roster.guests(rounds.commits[version].admissions) if tokens else ()
        usual.append(median_low([count for each, count in tokens.items() if each not in guests] or [0]))
        if site in tokens:
            first = min(first, version)
            merged += min(tokens[site], sum(usual[max(first, since) :]))
            since = version + 1
    return merged, sum(usual[first:]) + sum(usual[-1:])


def reason(why: str) -> str:
    """A reason without hashes, numbers and keys, so that equal ones count together, as it may be shown."""
    return visible(_DETAIL.sub("..", why))


def is_size(nbytes: int, numel: int) -> bool:
    """Whether a payload of `numel` values may have so many bytes, whatever its codec."""
    return nbytes <= MAX_VALUE_BYTES * numel + 4096


def read_rounds(
    store: Store, roster: Roster, fragment: int, runtime: Runtime, numel: int, end: int, *, momentum: bool
) -> FragmentRounds:
    """Read one fragment's log.

    roster            by which commits' makers are judged
    numel, momentum   of its masters
    end               of the run: no round closes from this version on, whatever stands there
    """
    found = FragmentRounds(fragment)
    listed = set(store.list(keys.rounds_prefix(fragment)))
    for key in listed:
        if keys.is_offer(key):
            place = keys.parse_collectable(key)
            assert place is not None
            found.offers.setdefault(place[1], set()).add(keys.offer_site(key))
    stored = [key for key in store.list(keys.masters_prefix(fragment)) if keys.is_master(key)]
    found.snapshots = sorted({keys.parse_master(key)[1] for key in stored})
    found.version = _version(fragment, listed, found.snapshots, end)
    versions, floor = range(found.version), 0
    for version, read in zip(
        versions, runtime.map(lambda v: read_or_say(store, Commit, keys.commit(fragment, v)), versions), strict=True
    ):
        fault = _commit_fault(roster, read, fragment, version, floor) if isinstance(read, Commit) else str(read)
        if isinstance(read, Commit) and fault is None:
            found.commits[version] = read
            floor = read.admissions
        else:
            found.problems.append(str(fault))
    found.faulty = _faulty(found)
    found.void = found.faulty | {version for version, commit in found.commits.items() if not commit.taken}
    found.merged_bytes = _merged_bytes(store, found, listed, numel, runtime)
    sizes = runtime.map(lambda key: _snapshot_bytes(store, key, numel, momentum), stored)
    found.snapshot_bytes = sum(size for size in sizes if isinstance(size, int))
    found.problems += [size for size in sizes if isinstance(size, str)]
    return found


def read_or_say(store: Store, kind: type[R], key: str) -> R | str:
    """The record at `key`, or what is wrong there."""
    try:
        return read_record(store, kind, key)
    except (KeyMissing, CorruptObject) as error:
        return str(error)


def _commit_fault(roster: Roster, commit: Commit, fragment: int, version: int, floor: int) -> str | None:
    """Why what it says of others counts for nothing; None when its maker may commit.

    floor   the admission that the commits before it honour
    """
    if not commit.is_at(fragment, version):
        fault: str | None = "is another round's"
    elif commit.admissions < floor:
        fault = f"honours admission {commit.admissions}, one before it {floor}"
    else:
        fault = roster.author_fault(commit)
    return None if fault is None else f"{keys.commit(fragment, version)} {fault}"


def _version(fragment: int, listed: set[str], snapshots: list[int], end: int) -> int:
    """Rounds closed, at most `end`: one more than the newest that has a commit, whatever is missing before it."""
    seen = {place[1] for key in listed if (place := keys.parse_collectable(key)) is not None} | set(snapshots)
    version = min(max(seen, default=0), end)
    while version > 0 and keys.commit(fragment, version - 1) not in listed:
        version -= 1
    while version < end and keys.commit(fragment, version) in listed:
        version += 1
    return version


def _faulty(found: FragmentRounds) -> set[int]:
    """Rounds void for an unsound commit, as the commits after them say; one that is void itself isn't believed."""
    faulty = {version for version in range(found.version) if version not in found.commits}
    for version in sorted(found.commits, reverse=True):
        if version not in faulty:
            faulty |= set(found.commits[version].voids) & set(range(found.version))
    return faulty


def _merged_bytes(store: Store, found: FragmentRounds, listed: set[str], numel: int, runtime: Runtime) -> int:
    """Bytes of the merged parts that stand. A part of one place has one size, so one record of each place is read."""
    standing: Counter[tuple[int, int]] = Counter()
    sample: dict[tuple[int, int], str] = {}
    for version, commit in found.commits.items():
        for index in range(min(commit.num_parts, MAX_PARTS)):
            key = keys.merged(found.fragment, version, index)
            if key in listed:
                standing[commit.num_parts, index] += 1
                sample[commit.num_parts, index] = key
    read = runtime.map(lambda key: read_or_say(store, Part, key), sample.values())
    total = 0
    for place, part in zip(sample, read, strict=True):
        if isinstance(part, Part) and is_size(part.nbytes, numel):
            total += part.nbytes * standing[place]
        else:
            size = f"{sample[place]} says {part.nbytes} bytes" if isinstance(part, Part) else part
            found.problems.append(f"{size}: not counted")
    return total


def _snapshot_bytes(store: Store, key: str, numel: int, momentum: bool) -> int | str:
    """Bytes of a stored master as its header states them, or what is wrong with it."""
    try:
        return read_header(store.get_range(key, 0, HEADER_BYTES), numel, momentum=momentum)
    except KeyMissing:
        return 0  # collected meanwhile
    except CorruptObject as error:
        return f"{key}: {error}"


def offered_bytes(
    store: Store, places: Iterable[tuple[int, int, str]], runtime: Runtime
) -> tuple[dict[tuple[int, int, str], int], dict[str, list[str]]]:
    """Payload bytes by (fragment, version, site) as the offers' records state them, and by site what couldn't be
    read."""
    wanted = list(places)
    read = runtime.map(lambda place: read_or_say(store, Offer, keys.offer(*place)), wanted)
    sizes = {place: offer.nbytes for place, offer in zip(wanted, read, strict=True) if isinstance(offer, Offer)}
    problems: dict[str, list[str]] = {}
    for (_, _, site), offer in zip(wanted, read, strict=True):
        if isinstance(offer, str):
            problems.setdefault(site, []).append(offer)
    return sizes, problems


@dataclass
class TapeFacts:
    """What one site's tape says.

    offered    bytes of its payload by (fragment, version) of the round; 0 where it had nothing to offer
    dropped    tokens by fragment; summed
    waits      the last wait that the site told of, and the incarnation that did
    traffic    (up, down) bytes by process: the most that it says, since each counts from its start
    problems   pieces and lines that aren't what a tape holds: the first few, and how many more
    """

    offered: dict[tuple[int, int], int] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
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
                if bad <= MAX_LINES:
                    facts.problems.append(f"{key} line {number} is no event ({type(error).__name__})")
    if bad > MAX_LINES:
        facts.problems.append(f"{facts.problems[-1].partition(' ')[0]} and others: {bad - MAX_LINES:,} more such lines")
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
    if kind not in ("offer", "dropped"):
        return
    fragment, version = count(event["fragment"]), count(event["version"])
    if kind == "offer":
        facts.offered[fragment, version] = count(event["nbytes"]) if event["tokens"] else 0
    else:
        facts.dropped[fragment] = facts.dropped.get(fragment, 0) + count(event["tokens"])
