"""The folder that asking fills: the answers by content, the ledger of what they cost, and who the teachers are.

answers.jsonl   what teachers wrote, each under the key of its question; no question is asked a second time
ledger.jsonl    a call's dollars: reserved, then settled
batches.jsonl   which calls went out together to a batch API, and its name for them
teachers.json   names and weights of the teachers by what answers alike, from the newest teachers' file
agreed.json     servers of others to which this folder's questions may go
lock            held by the one process that asks
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.errors import BadInput
from composer_prime.traces.answers import Answer
from composer_prime.traces.ask.ledger import Ledger, Record, Totals, read_record
from composer_prime.traces.ask.lines import LineWriter, read_line, read_lines
from composer_prime.traces.ask.prices import nano_usd
from composer_prime.traces.ask.questions import Question, sampling_id
from composer_prime.traces.states import Message


@dataclass(frozen=True)
class Kept:
    """A teacher's answer in the cache.

    state     TraceState.id
    sampling  `sampling_id` of the teacher that wrote it
    record    what it cost; its key is the question's
    action    None: it was unusable
    why       it was unusable
    """

    state: str
    sampling: str
    record: Record
    action: Message | None
    why: str | None = None


class Place(NamedTuple):
    """An answer in the cache: where its line begins, nano-dollars that it cost, and whether it is of use."""

    at: int
    cost: int
    is_usable: bool


class AnswerFolder:
    """Reads what was answered; `held` is for the one process that asks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._answers_file, self._teachers_file = root / "answers.jsonl", root / "teachers.json"
        self._agreed_file = root / "agreed.json"

    def answers(self) -> Iterator[Answer]:
        """The usable answers of the teachers that the newest teachers' files name, by state and teacher.

        Raises BadInput where nothing was asked yet.
        """
        if not self._teachers_file.is_file():
            raise BadInput(f"answers ({self.root}) hold none: ask teachers first, with composer-prime replay ask")
        teachers = self._json(self._teachers_file)
        places = {}
        for at, kept in self._kept():
            if kept.sampling in teachers and kept.action is not None:
                places[kept.record.key] = kept.state, teachers[kept.sampling]["name"], at
        for _, _, at in sorted(places.values()):
            one = self.read(at)
            named, model = teachers[one.sampling], one.record.model_used or one.record.model_requested
            assert one.action is not None
            yield Answer(one.state, named["name"], model, one.action, named["weight"])

    def places(self) -> dict[str, Place]:
        """Where the answers are, by key."""
        return {kept.record.key: _place(at, kept) for at, kept in self._kept()}

    def read(self, at: int) -> Kept:
        """The answer at a place."""
        return _read_kept(read_line(self._answers_file, at))

    def ledger(self) -> tuple[Record, ...]:
        """How each call stands, in the order they were sent."""
        return tuple({record.call: record for record in self._records()}.values())

    def totals(self) -> Totals:
        """The sums of the ledger."""
        return Totals(self._records())

    @contextmanager
    def held(self, teachers: Sequence[TextTeacher], ceiling: int) -> Iterator["OpenFolder"]:
        """Hold the folder to ask these teachers under a ceiling in nano-dollars.

        Raises BadInput when another process holds it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            lock = stack.enter_context((self.root / "lock").open("a+"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(
                    f"answers ({self.root}) are being asked for by another process: wait for it, or stop it"
                ) from None
            self._name(teachers)
            names = ("answers", "ledger", "batches")
            answers, lines, batches = (
                stack.enter_context(closing(LineWriter(self.root / f"{name}.jsonl"))) for name in names
            )
            places = self.places()
            ledger = Ledger(lines, self.totals(), ceiling)
            book = BatchBook(batches)
            ledger.recover(self._answered(ledger, places), book.token_of)
            yield OpenFolder(self, ledger, places, answers, book)

    def has_agreed(self, hosts: Iterable[str]) -> bool:
        """Whether questions of this folder may go to all of these."""
        return set(hosts) <= set(self._json(self._agreed_file))

    def agree(self, hosts: Iterable[str]) -> None:
        """Note that they may."""
        _replace(self._agreed_file, {**self._json(self._agreed_file), **dict.fromkeys(hosts, True)})

    def _answered(self, ledger: Ledger, places: Mapping[str, Place]) -> dict[str, Record]:
        """Of the calls that a killed process left open, those with a stored answer."""
        open_ = [record for record in ledger.totals.unknown.values() if record.outcome == "reserved"]
        found = [self.read(places[record.key].at).record for record in open_ if record.key in places]
        return {record.call: record for record in found}

    def _records(self) -> Iterator[Record]:
        return (read_record(line) for _, line in read_lines(self.root / "ledger.jsonl"))

    def _kept(self) -> Iterator[tuple[int, Kept]]:
        return ((at, _read_kept(line)) for at, line in read_lines(self._answers_file))

    def _json(self, path: Path) -> dict[str, Any]:
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return {}

    def _name(self, teachers: Sequence[TextTeacher]) -> None:
        """Give the teachers their names and weights; another model that had a name before loses its vote."""
        names, known = {teacher.name for teacher in teachers}, self._json(self._teachers_file)
        known = {sampling: named for sampling, named in known.items() if named["name"] not in names}
        known |= {sampling_id(teacher): {"name": teacher.name, "weight": teacher.weight} for teacher in teachers}
        _replace(self._teachers_file, known)


class BatchBook:
    """Which calls went out in which batch: written before it is made, and again once it has a name.

    batches   by our own token: the calls in it, and the server's id for it; None: nobody noted one
    token_of  the batch of each call
    """

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer
        self.batches: dict[str, dict[str, Any]] = {}
        self.token_of: dict[str, str] = {}
        for _, line in read_lines(writer.path):
            self._take(**line)

    async def note(self, token: str, **more: Any) -> None:
        """Write down more of a batch; it is on the disk when this returns."""
        self._writer.write({"token": token, **more})
        self._take(token, **more)
        await self._writer.synced()

    def _take(self, token: str, **more: Any) -> None:
        self.batches.setdefault(token, {"id": None}).update(more)
        self.token_of.update(dict.fromkeys(more.get("calls", ()), token))


class OpenFolder:
    """A folder that is held: its ledger, its batches, and the cache that grows."""

    def __init__(
        self, folder: AnswerFolder, ledger: Ledger, places: dict[str, Place], writer: LineWriter, batches: BatchBook
    ) -> None:
        self.ledger, self.batches = ledger, batches
        self._folder, self._places, self._writer = folder, places, writer

    def place(self, key: str) -> Place | None:
        """The answer under this key, of this run or an earlier one."""
        return self._places.get(key)

    def find(self, question: Question) -> Kept | None:
        """What the teacher wrote to this question."""
        place = self._places.get(question.key)
        return None if place is None else self._folder.read(place.at)

    async def keep(self, kept: Kept) -> None:
        """Write an answer down, then what it cost: a kill between the two loses neither."""
        at = self._writer.write({**vars(kept), "record": vars(kept.record)})
        self._places[kept.record.key] = _place(at, kept)
        await self._writer.synced()
        await self.ledger.close_call(kept.record)


def _place(at: int, kept: Kept) -> Place:
    return Place(at, nano_usd(kept.record.usd_settled or 0), kept.action is not None)


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(fresh, path)


def _read_kept(line: Mapping[str, Any]) -> Kept:
    try:
        return Kept(**{**line, "record": read_record(line["record"])})
    except (TypeError, KeyError) as error:
        raise BadInput(
            f"a line of the answers isn't one of ours ({error}): restore it, or use another folder"
        ) from None
