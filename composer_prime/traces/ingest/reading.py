"""What a file gives: its sessions, and an account in which every record is kept or dropped for a reason.

Of some formats a JSON value is a document that holds sessions of its own, and its records are items of a list: steps,
messages, events. Of others all lines are one session, and the records are the lines.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_prime.traces.ingest.records import Entry, Part, mapping, name_or_none, sequence
from composer_prime.traces.ingest.session import Draft, Node, Original, Session

NO_DECISION = "session without a decision point"
BROKEN_PARENT = "parent missing"


@dataclass
class Document:
    """What a reader makes of one JSON value, or of a log.

    items   its records
    fates   why an item made no node, by its number; an item that did may stand here, too
    drafts  its sessions, whose nodes name items
    """

    items: list[Any]
    fates: dict[int, str] = field(default_factory=dict)
    drafts: list[Draft] = field(default_factory=list)


@dataclass
class Reading:
    """What one file gave; formats add to it.

    num_records  records it holds
    dropped      records whose content no node holds, by reason; with those used they sum to `num_records`
    num_bytes    of all records; used_bytes of those that are used
    """

    sessions: list[Session] = field(default_factory=list)
    num_records: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    used_bytes: int = 0

    @property
    def num_used(self) -> int:
        """Records whose content a node holds."""
        return self.num_records - self.dropped.total()

    def add(self, format: str, document: Document, entries: Sequence[tuple[str, Entry]], owners: Sequence[int]) -> None:
        """Add a document's sessions, each with the entries that tell of it, and what became of its records.

        entries  with the name of the part that each is of
        owners   of each record, the number of the entry that holds it

        Raises KeyError for a record that is neither in a node nor has a fate.
        """
        told = [{record for node in draft.nodes for record in node.records} for draft in document.drafts]
        used: set[int] = set()
        reasons = dict(document.fates)
        for draft, records in zip(document.drafts, told, strict=True):
            if not any(node.is_decision for node in draft.nodes):
                reasons |= dict.fromkeys(records, NO_DECISION)
                continue
            used |= records
            kept = {owners[record] for node in draft.nodes for record in (*node.records, *node.links)}
            numbers = [record for record, owner in enumerate(owners) if owner in kept]
            ranks = {record: rank for rank, record in enumerate(numbers)}
            before = sum(min(ranks.keys() & other, default=len(owners)) < min(records) for other in told)
            original = _originals([entries[entry] for entry in sorted(kept)])
            nodes = tuple(_renumbered(node, ranks) for node in draft.nodes)
            tools = tuple(draft.tools)
            session = Session(format, draft.name, before, original, nodes, tools, draft.reward, cwd=draft.cwd)
            self.sessions.append(session)
        num_held = Counter(owners)
        for record, (item, owner) in enumerate(zip(document.items, owners, strict=True)):
            size = len(entries[owner][1].text) if num_held[owner] == 1 else len(json.dumps(item))
            self.num_bytes += size
            self.used_bytes += size if record in used else 0
        self.num_records += len(document.items)
        self.dropped.update(reasons[record] for record in range(len(document.items)) if record not in used)


def _originals(entries: Sequence[tuple[str, Entry]]) -> tuple[Original, ...]:
    """The texts by part, the main one first. Of several records each ends its line, which a file's last may lack."""
    texts: dict[str, list[str]] = {"": []}
    for name, entry in entries:
        needs_end = len(entries) > 1 and not entry.text.endswith("\n")
        texts.setdefault(name, []).append(entry.text + "\n" * needs_end)
    return tuple(Original(name, "".join(lines)) for name, lines in texts.items())


def _renumbered(node: Node, ranks: Mapping[int, int]) -> Node:
    records, links = (tuple(sorted(ranks[one] for one in given)) for given in (node.records, node.links))
    return replace(node, records=records, links=links)


@dataclass(frozen=True)
class Format(ABC):
    """A format that is read.

    name   as `--format` names it
    marks  what a JSON value must have to be of it, and whether it does
    """

    name: str
    marks: Callable[[Any], Mapping[str, bool]]

    @abstractmethod
    def read(self, parts: Sequence[Part]) -> Reading:
        """What the files of a session say, the main one first."""

    def lacks(self, value: Any) -> list[str]:
        """The marks that a JSON value doesn't have."""
        return [mark for mark, holds in self.marks(value).items() if not holds]

    def problem(self, entry: Entry) -> str | None:
        """Why an entry isn't read; None: it is of the format."""
        return entry.problem or (f"not {self.name}" if self.lacks(entry.value) else None)


@dataclass(frozen=True)
class Documents(Format):
    """A format whose JSON values are documents."""

    document: Callable[[Any], Document]

    def read(self, parts: Sequence[Part]) -> Reading:
        reading = Reading()
        for entry in parts[0].entries:
            problem = self.problem(entry)
            document = Document([None], {0: problem}) if problem else self.document(entry.value)
            reading.add(self.name, document, [("", entry)], [0] * len(document.items))
        return reading


class LineReader(ABC):
    """Makes a session of lines, one after the other, but none before the one that it names as its parent."""

    def __init__(self) -> None:
        self.draft = Draft()
        self.lines: Sequence[Mapping[str, Any]] = ()

    def read(self, lines: list[Any], fates: dict[int, str]) -> Document:
        """The session; lines that have a fate are left out, and `fates` is added to."""
        self.lines = [mapping(line) for line in lines]
        names, parents = ([name_or_none(line.get(key)) for line in self.lines] for key in ("uuid", "parentUuid"))
        for number in parents_first(names, parents):
            if number not in fates and (fate := self.take(number, self.lines[number])) is not None:
                fates[number] = fate
        return Document(lines, fates, [self.draft])

    @abstractmethod
    def take(self, number: int, line: Mapping[str, Any]) -> str | None:
        """Add what a line says; why it is dropped, if it is."""


@dataclass(frozen=True)
class Log(Format):
    """A format whose lines, of all parts, are one session. A value that lists lines is a document.

    reader  reads one session
    listed  the lines that a JSON value lists
    """

    reader: Callable[[], LineReader]
    listed: Callable[[Any], Sequence[Any]] = sequence

    def read(self, parts: Sequence[Part]) -> Reading:
        if any(self.listed(entry.value) and not self.problem(entry) for entry in parts[0].entries):
            return Documents(self.name, self.marks, self._listed_session).read(parts)
        entries = [(part.name, entry) for part in parts for entry in part.entries]
        fates = {number: entry.problem for number, (_, entry) in enumerate(entries) if entry.problem is not None}
        document = self.reader().read([entry.value for _, entry in entries], fates)
        reading = Reading()
        reading.add(self.name, document, entries, range(len(entries)))
        return reading

    def _listed_session(self, value: Any) -> Document:
        return self.reader().read(list(self.listed(value)) or [value], {})


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
