"""The folder that asking fills: the answers by content, the ledger of what they cost, and who the teachers are.

answers.jsonl   what teachers wrote, each under the key of its question; no question is asked a second time
ledger.jsonl    a call's dollars: reserved, then settled
teachers.json   names and weights of the teachers by what answers alike, from the newest teachers' file
lock            held by the one process that asks
"""

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.errors import BadInput
from composer_prime.traces.answers import Answer
from composer_prime.traces.ask.ledger import Ledger, Record, last_records, read_record
from composer_prime.traces.ask.lines import LineWriter, read_lines
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


class AnswerFolder:
    """Reads what was answered; `held` is for the one process that asks."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def answers(self) -> Iterator[Answer]:
        """The usable answers of the teachers that the newest teachers' files name, by state and teacher.

        Raises BadInput where nothing was asked yet.
        """
        if not self._teachers_file.is_file():
            raise BadInput(f"answers ({self.root}) hold none: ask teachers first, with composer-prime replay ask")
        teachers = self._teachers()
        kept = [one for one in self.kept().values() if one.sampling in teachers]
        for one in sorted(kept, key=lambda one: (one.state, teachers[one.sampling]["name"])):
            if one.action is not None:
                named = teachers[one.sampling]
                model = one.record.model_used or one.record.model_requested
                yield Answer(one.state, named["name"], model, one.action, named["weight"])

    def kept(self) -> dict[str, Kept]:
        """What teachers wrote, by key."""
        lines = (_read_kept(line) for line in read_lines(self._answers_file))
        return {kept.record.key: kept for kept in lines}

    def ledger(self) -> tuple[Record, ...]:
        """How each call stands, in the order they were sent."""
        return tuple(last_records(map(read_record, read_lines(self._ledger_file))).values())

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
            answers = stack.enter_context(closing(LineWriter(self._answers_file)))
            lines = stack.enter_context(closing(LineWriter(self._ledger_file)))
            kept = self.kept()
            ledger = Ledger(lines, self.ledger(), ceiling)
            ledger.recover({one.record.call: one.record for one in kept.values()})
            yield OpenFolder(ledger, kept, answers)

    @property
    def _answers_file(self) -> Path:
        return self.root / "answers.jsonl"

    @property
    def _ledger_file(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def _teachers_file(self) -> Path:
        return self.root / "teachers.json"

    def _teachers(self) -> dict[str, Any]:
        try:
            return json.loads(self._teachers_file.read_text())
        except FileNotFoundError:
            return {}

    def _name(self, teachers: Sequence[TextTeacher]) -> None:
        """Give the teachers their names and weights; another model that had a name before loses its vote."""
        names = {teacher.name for teacher in teachers}
        known = {sampling: named for sampling, named in self._teachers().items() if named["name"] not in names}
        known |= {sampling_id(teacher): {"name": teacher.name, "weight": teacher.weight} for teacher in teachers}
        fresh = self._teachers_file.with_suffix(".new")
        fresh.write_text(json.dumps(known, indent=1) + "\n")
        os.replace(fresh, self._teachers_file)


class OpenFolder:
    """A folder that is held: its ledger, and the cache that grows."""

    def __init__(self, ledger: Ledger, kept: dict[str, Kept], writer: LineWriter) -> None:
        self.ledger = ledger
        self._kept = kept
        self._writer = writer

    def find(self, question: Question) -> Kept | None:
        """What the teacher wrote to this question, in this run or an earlier one."""
        return self._kept.get(question.key)

    async def keep(self, kept: Kept) -> None:
        """Write an answer down, then what it cost: a kill between the two loses neither."""
        self._writer.append(dataclasses.asdict(kept))
        self._kept[kept.record.key] = kept
        await self.ledger.close_call(kept.record)


def _read_kept(line: Mapping[str, Any]) -> Kept:
    try:
        return Kept(**{**line, "record": read_record(line["record"])})
    except (TypeError, KeyError) as error:
        raise BadInput(
            f"a line of the answers isn't one of ours ({error}): restore it, or use another folder"
        ) from None
