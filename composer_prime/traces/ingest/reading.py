"""What a reader makes of a file: its sessions, and an account in which every record is kept or dropped for a reason.

Two kinds of formats. In a log, a record is a line, and the file is one session. In a document, a record is an item of a
list (a step, a message, an event), and every JSON value of the file holds sessions of its own.
"""

import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_prime.traces.ingest.records import Entry, Part
from composer_prime.traces.ingest.session import Draft, Node, Original, Session

NO_DECISION = "session without a decision point"
BROKEN_PARENT = "parent missing"


@dataclass(frozen=True)
class Reading:
    """What one file gave.

    num_records  records it holds, counted before any is read
    dropped      records whose content no node holds, by reason; with those used they sum to `num_records`
    num_bytes    of all records as JSON
    used_bytes   of those that are used
    """

    sessions: tuple[Session, ...]
    num_records: int
    dropped: Mapping[str, int]
    num_bytes: int
    used_bytes: int

    @property
    def num_used(self) -> int:
        """Records whose content a node holds."""
        return self.num_records - sum(self.dropped.values())


@dataclass
class Document:
    """What a reader makes of one JSON value.

    items   its records
    fates   why an item made no node, by its number; an item that did may stand here, too
    drafts  its sessions, whose nodes name items
    """

    items: list[Any]
    fates: dict[int, str] = field(default_factory=dict)
    drafts: list[Draft] = field(default_factory=list)


def read_documents(
    format: str, parts: Sequence[Part], lacks: Callable[[Any], list[str]], read: Callable[[Any], Document]
) -> Reading:
    """Every JSON value of the main file by itself; other parts belong to each of its sessions."""
    sessions: list[Session] = []
    account = _Account()
    for entry in parts[0].entries:
        if entry.problem is not None or lacks(entry.value):
            account.add([], [len(entry.text)], {0: entry.problem or f"not {format}"})
            continue
        document = read(entry.value)
        original = (Original("", entry.text), *_beside(parts))
        found = [draft.finished(format, number, original) for number, draft in enumerate(document.drafts)]
        account.add(found, [len(json.dumps(item)) for item in document.items], document.fates)
        sessions += [session for session in found if any(node.is_decision for node in session.nodes)]
    return account.reading(sessions)


def read_together(
    format: str,
    parts: Sequence[Part],
    lacks: Callable[[Any], list[str]],
    items: Callable[[Any], Sequence[Any]],
    read: Callable[[list[Any]], Document],
) -> Reading:
    """The items of all JSON values of the main file as one list; a session is kept with the values that it is of.

    items  those of one value
    read   makes the document; a session of it has a record in every value that tells of it
    """
    entries = parts[0].entries
    account = _Account()
    listed: list[Any] = []
    owners: list[int] = []
    for number, entry in enumerate(entries):
        found = () if entry.problem is not None or lacks(entry.value) else items(entry.value)
        if not found:
            account.add([], [len(entry.text)], {0: entry.problem or f"not {format}"})
        listed += found
        owners += [number] * len(found)
    document = read(listed)
    used = [sorted({record for node in draft.nodes for record in node.records}) for draft in document.drafts]
    sessions: list[Session] = []
    for draft, own in zip(document.drafts, used, strict=True):
        lines = sorted({owners[record] for record in own})
        ranks = {one: rank for rank, one in enumerate(one for one, owner in enumerate(owners) if owner in set(lines))}
        firsts = [next((record for record in other if record in ranks), own[0]) for other in used]
        text = entries[lines[0]].text if len(lines) == 1 else "".join(_line(entries[line]) for line in lines)
        session = draft.finished(format, sum(first < own[0] for first in firsts), (Original("", text), *_beside(parts)))
        sessions.append(replace(session, nodes=tuple(_renumbered(node, ranks) for node in draft.nodes)))
    whole = [draft.finished(format, 0, ()) for draft in document.drafts]
    account.add(whole, [len(json.dumps(item)) for item in listed], document.fates)
    return account.reading([session for session in sessions if any(node.is_decision for node in session.nodes)])


def _beside(parts: Sequence[Part]) -> tuple[Original, ...]:
    return tuple(Original(part.name, "".join(entry.text for entry in part.entries)) for part in parts[1:])


def _renumbered(node: Node, ranks: Mapping[int, int]) -> Node:
    records, links = (tuple(sorted(ranks[one] for one in given)) for given in (node.records, node.links))
    return replace(node, records=records, links=links)


def read_log(format: str, parts: Sequence[Part], read: Callable[[Sequence[Any], dict[int, str]], Draft]) -> Reading:
    """All lines of all parts as one session.

    read  takes the lines' values and a record of fates, which says of some that they can't be read, and adds to it
    """
    entries = [(part.name, entry) for part in parts for entry in part.entries]
    fates = {number: entry.problem for number, (_, entry) in enumerate(entries) if entry.problem is not None}
    draft = read([entry.value for _, entry in entries], fates)
    kept = sorted({record for node in draft.nodes for record in (*node.records, *node.links)})
    ranks = {record: rank for rank, record in enumerate(kept)}
    nodes = [_renumbered(node, ranks) for node in draft.nodes]
    original = tuple(
        Original(part.name, "".join(_line(entries[record][1]) for record in kept if entries[record][0] == part.name))
        for part in parts
    )
    session = replace(draft, nodes=nodes).finished(
        format, 0, tuple(part for part in original if part.text or not part.name)
    )
    account = _Account()
    account.add([replace(session, nodes=tuple(draft.nodes))], [len(entry.text) for _, entry in entries], fates)
    return account.reading([session] if any(node.is_decision for node in nodes) else [])


def read_events(
    format: str,
    parts: Sequence[Part],
    lacks: Callable[[Any], list[str]],
    read: Callable[[Sequence[Any], dict[int, str]], Draft],
) -> Reading:
    """Every list of the main file as a session, by itself; where there is none, all lines of all parts as one."""
    if not any(isinstance(entry.value, list) for entry in parts[0].entries):
        entries = tuple(entry for part in parts for entry in part.entries)
        return read_log(format, [Part("", entries)], read)

    def document(value: Any) -> Document:
        fates: dict[int, str] = {}
        items = list(value) if isinstance(value, list) else [value]
        return Document(items, fates, [read(items, fates)])

    return read_documents(format, parts, lacks, document)


def parents_first(names: Sequence[Hashable], parents: Sequence[Hashable]) -> list[int]:
    """The numbers of records in the order of the file, but none before the one that it names as its parent.

    names    of the records; None: nameless
    parents  names of records, or of none that is there

    Records of a circle come last.
    """
    known = set(names) - {None}
    taken: set[Hashable] = set()
    waiting: dict[Hashable, list[int]] = {}
    order: list[int] = []
    for number, parent in enumerate(parents):
        if parent in known and parent not in taken:
            waiting.setdefault(parent, []).append(number)
            continue
        ready = [number]
        while ready:
            order.append(ready.pop())
            taken.add(names[order[-1]])
            ready += reversed(waiting.pop(names[order[-1]], []))
    return order + sorted(number for numbers in waiting.values() for number in numbers)


def _line(entry: Entry) -> str:
    """A record of a log with its end, which the file's last may lack."""
    return entry.text if entry.text.endswith("\n") else entry.text + "\n"


@dataclass
class _Account:
    """What became of a file's records."""

    num_records: int = 0
    num_bytes: int = 0
    used_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, sessions: Sequence[Session], sizes: Sequence[int], fates: Mapping[int, str]) -> None:
        """Take in records of these sizes. Raises KeyError for one that is neither in a node nor has a fate."""
        reasons: dict[int, str] = {}
        used: set[int] = set()
        for session in sessions:
            records = {record for node in session.nodes for record in node.records}
            if any(node.is_decision for node in session.nodes):
                used |= records
            else:
                reasons |= dict.fromkeys(records, NO_DECISION)
        reasons |= {record: reason for record, reason in fates.items() if record not in reasons}
        self.num_records += len(sizes)
        self.num_bytes += sum(sizes)
        self.used_bytes += sum(sizes[record] for record in used)
        self.dropped += Counter(reasons[record] for record in range(len(sizes)) if record not in used)

    def reading(self, sessions: Sequence[Session]) -> Reading:
        return Reading(tuple(sessions), self.num_records, self.dropped, self.num_bytes, self.used_bytes)
