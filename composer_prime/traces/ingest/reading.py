"""What a reader makes of a file: its sessions, and an account in which every record is kept or dropped for a reason.

Two kinds of formats. In a log, a record is a line, and the file is one session. In a document, a record is an item of a
list (a step, a message, an event), and every JSON value of the file holds sessions of its own.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_prime.traces.ingest.records import Entry, Part
from composer_prime.traces.ingest.session import Draft, Original, Session

NO_DECISION = "session without a decision point"
BROKEN_PARENT = "parent missing"


@dataclass(frozen=True)
class Reading:
    """What one file gave.

    num_records  records it holds, counted before any is read
    dropped      records that made no node, by reason; with those kept they sum to `num_records`
    """

    sessions: tuple[Session, ...]
    num_records: int
    dropped: Mapping[str, int]

    @property
    def num_kept(self) -> int:
        """Records that made nodes."""
        return self.num_records - sum(self.dropped.values())


@dataclass
class Document:
    """What a reader makes of one JSON value.

    num_records  items it holds
    fates        why an item made no node, by its number; an item that did may stand here, too
    drafts       its sessions, whose nodes name items
    """

    num_records: int
    fates: dict[int, str] = field(default_factory=dict)
    drafts: list[Draft] = field(default_factory=list)


def read_documents(
    format: str, parts: Sequence[Part], lacks: Callable[[Any], list[str]], read: Callable[[Any], Document]
) -> Reading:
    """Every JSON value of the main file by itself; other parts belong to each of its sessions."""
    beside = tuple(Original(part.name, "".join(entry.text for entry in part.entries)) for part in parts[1:])
    sessions: list[Session] = []
    num_records, dropped = 0, Counter[str]()
    for entry in parts[0].entries:
        if entry.problem is not None or lacks(entry.value):
            num_records += 1
            dropped[entry.problem or f"not {format}"] += 1
            continue
        document = read(entry.value)
        original = (Original("", entry.text), *beside)
        found = [draft.finished(format, number, original) for number, draft in enumerate(document.drafts)]
        num_records += document.num_records
        dropped += _account(found, document.num_records, document.fates)
        sessions += [session for session in found if any(node.is_decision for node in session.nodes)]
    return Reading(tuple(sessions), num_records, dropped)


def read_log(format: str, parts: Sequence[Part], read: Callable[[Sequence[Any], dict[int, str]], Draft]) -> Reading:
    """All lines of all parts as one session.

    read  takes the lines' values and a record of fates, which says of some that they can't be read, and adds to it
    """
    entries = [(part.name, entry) for part in parts for entry in part.entries]
    fates = {number: entry.problem for number, (_, entry) in enumerate(entries) if entry.problem is not None}
    draft = read([entry.value for _, entry in entries], fates)
    kept = sorted({record for node in draft.nodes for record in node.records})
    ranks = {record: rank for rank, record in enumerate(kept)}
    nodes = [replace(node, records=tuple(sorted(ranks[one] for one in node.records))) for node in draft.nodes]
    original = tuple(
        Original(part.name, "".join(_line(entries[record][1]) for record in kept if entries[record][0] == part.name))
        for part in parts
    )
    session = replace(draft, nodes=nodes).finished(
        format, 0, tuple(part for part in original if part.text or not part.name)
    )
    dropped = _account([replace(session, nodes=tuple(draft.nodes))], len(entries), fates)
    has_decision = any(node.is_decision for node in nodes)
    return Reading((session,) if has_decision else (), len(entries), dropped)


def _line(entry: Entry) -> str:
    """A record of a log with its end, which the file's last may lack."""
    return entry.text if entry.text.endswith("\n") else entry.text + "\n"


def _account(sessions: Sequence[Session], num_records: int, fates: Mapping[int, str]) -> Counter[str]:
    """The dropped records by reason. Raises KeyError for one that is neither in a node nor has a fate."""
    reasons: dict[int, str] = {}
    kept: set[int] = set()
    for session in sessions:
        records = {record for node in session.nodes for record in node.records}
        if any(node.is_decision for node in session.nodes):
            kept |= records
        else:
            reasons |= dict.fromkeys(records, NO_DECISION)
    reasons |= {record: reason for record, reason in fates.items() if record not in reasons}
    return Counter(reasons[record] for record in range(num_records) if record not in kept)
