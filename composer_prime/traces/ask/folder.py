"""The folder that asking fills: the answers by content, the ledger of what they cost, and who the teachers are.

answers.sqlite  all of it, see `database.py`
lock            held by the one process that asks
"""

import fcntl
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.errors import BadInput
from composer_prime.traces.answers import Answer
from composer_prime.traces.ask.database import Database
from composer_prime.traces.ask.ledger import Ledger, Record
from composer_prime.traces.ask.questions import sampling_id
from composer_prime.traces.states import Message


class AnswerFolder:
    """Reads what was answered, also while a process asks: as it stood at one moment.

    Raises BadInput where it is of an earlier version.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._file = root / "answers.sqlite"
        for name in ("answers.jsonl", "ledger.jsonl"):
            if (root / name).exists():
                raise BadInput(f"answers ({root}) are of an earlier version ({name}): ask into another folder")

    def answers(self) -> Iterator[Answer]:
        """The usable answers of the teachers that the newest teachers' files name, by state and teacher.

        Raises BadInput where nothing was asked yet.
        """
        if not self._file.is_file():
            raise BadInput(f"answers ({self.root}) hold none: ask teachers first, with composer-prime replay ask")
        with closing(Database(self._file, is_copy=True)) as database:
            named = "FROM answers JOIN teachers USING (sampling) JOIN calls USING (call)"
            one = f"SELECT state, name, COALESCE(model_used, model_requested), action, weight {named}"
            for place in database.rows(f"SELECT answers.rowid {named} WHERE action IS NOT NULL ORDER BY state, name"):
                ((state, name, model, action, weight),) = database.rows(f"{one} WHERE answers.rowid = ?", *place)
                yield Answer(state, name, model, json.loads(action), weight)

    def ledger(self) -> tuple[Record, ...]:
        """How each call stands, in the order they were sent."""
        with self.copied() as copy:
            return tuple(copy.ledger.records())

    @contextmanager
    def copied(self) -> Iterator["OpenFolder"]:
        """All of it as it stands now, to be read; empty where nothing was asked yet."""
        with closing(Database(self._file, is_copy=True)) as database:
            yield OpenFolder(database, 0)

    @contextmanager
    def held(self, teachers: Sequence[TextTeacher], ceiling: int) -> Iterator["OpenFolder"]:
        """Hold the folder to ask these teachers under a ceiling in nano-dollars.

        Raises BadInput when another process holds it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(
                    f"answers ({self.root}) are being asked for by another process: wait for it, or stop it"
                ) from None
            with closing(Database(self._file)) as database:
                # Another model that had a name before loses its vote.
                forget, name = "DELETE FROM teachers WHERE name = ?", "INSERT OR REPLACE INTO teachers VALUES (?, ?, ?)"
                database.write(*((forget, (one.name,)) for one in teachers))
                database.write(*((name, (sampling_id(one), one.name, one.weight)) for one in teachers))
                opened = OpenFolder(database, ceiling)
                opened.ledger.recover()
                database.commit()
                yield opened


class OpenFolder:
    """A folder that is held, or a copy of one: its database, its ledger, and the answers that grow.

    kept  by its question's key, what an answer cost in nano-dollars, and whether it is of use
    """

    def __init__(self, database: Database, ceiling: int) -> None:
        self.database = database
        self.ledger = Ledger(database, ceiling)
        query = "SELECT answers.key, settled_nano_usd, action IS NOT NULL FROM answers JOIN calls USING (call)"
        self.kept: dict[str, tuple[int, bool]] = {
            key: (cost, is_usable) for key, cost, is_usable in database.rows(query)
        }

    def find(self, key: str) -> Message | None:
        """What a teacher answered; None: nothing of use."""
        ((action,),) = self.database.rows("SELECT action FROM answers WHERE key = ?", key)
        return None if action is None else json.loads(action)

    def keep(self, state: str, sampling: str, record: Record, action: Message | None, why: str | None) -> None:
        """Write down an answer and what it cost, both in one commit.

        state     TraceState.id
        sampling  `sampling_id` of the teacher that wrote it
        why       it is of no use
        """
        text = None if action is None else json.dumps(action, separators=(",", ":"))
        row = (record.key, record.call, state, sampling, text, why)
        self.ledger.close_call(record, ("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)", row))
        self.kept[record.key] = record.settled_nano_usd or 0, action is not None

    def hosts(self) -> set[str]:
        """Servers of others to which questions of this folder may go."""
        return {host for (host,) in self.database.rows("SELECT host FROM hosts")}

    def agree(self, hosts: Iterable[str]) -> None:
        """Note that they may go to these."""
        self.database.write(*(("INSERT OR IGNORE INTO hosts VALUES (?)", (host,)) for host in hosts))
