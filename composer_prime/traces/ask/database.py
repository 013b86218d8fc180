"""`answers.sqlite`, the one file of an answers' folder: written in transactions that many calls share.

A journal and not WAL, whose shared memory network file systems lack; truncated and not deleted, since SQLite syncs that
too: a reservation that was committed outlives a loss of power.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from composer_prime.errors import BadInput, ComposerPrimeError, SystemRefused

BUSY_S = 60.0
"""For so long a reader and a writer wait for each other; each needs the file for moments."""

Statement: TypeAlias = tuple[str, Sequence[Any] | Mapping[str, Any]]
"""SQL that writes, and its values."""

APPLICATION_ID = 0x61736B31
"""In the file's header: these tables. Others get another number."""

_TABLES = f"""
BEGIN IMMEDIATE;
PRAGMA application_id = {APPLICATION_ID};
CREATE TABLE calls (
    call TEXT PRIMARY KEY, key TEXT NOT NULL, teacher TEXT NOT NULL, model_requested TEXT NOT NULL, model_used TEXT,
    outcome TEXT NOT NULL, at REAL NOT NULL, latency_s REAL,
    reserved_nano_usd INTEGER NOT NULL, settled_nano_usd INTEGER,
    prompt_tokens INTEGER, cached_tokens INTEGER, cache_write_tokens INTEGER,
    completion_tokens INTEGER, reasoning_tokens INTEGER,
    batch TEXT REFERENCES batches
);
CREATE TABLE answers (
    key TEXT PRIMARY KEY, call TEXT NOT NULL REFERENCES calls, state TEXT NOT NULL, sampling TEXT NOT NULL,
    action TEXT, why TEXT
);
CREATE TABLE batches (token TEXT PRIMARY KEY, id TEXT);
CREATE TABLE teachers (sampling TEXT PRIMARY KEY, name TEXT NOT NULL, weight REAL NOT NULL);
CREATE TABLE hosts (host TEXT PRIMARY KEY);
COMMIT;
"""


class Database:
    """A connection to the file, which is made where there is none. `close` it in the end.

    is_copy  reads the file as it stands now from a private copy, and neither makes nor changes it

    Everything here raises BadInput where the file is damaged or another one, and SystemRefused where the system doesn't
    let it be read or written.
    """

    def __init__(self, path: Path, is_copy: bool = False) -> None:
        self._path = path
        self._pending: list[Statement] = []
        self._next_commit: asyncio.Task[None] | None = None
        self._one_commit, self._lock = asyncio.Lock(), threading.Lock()
        self._failure: ComposerPrimeError | None = None
        with ExitStack() as stack, self._told():
            connection = sqlite3.connect("" if is_copy else path, timeout=BUSY_S, check_same_thread=False)
            self._connection = stack.enter_context(closing(connection))
            if not is_copy:
                self._connection.execute("PRAGMA journal_mode = TRUNCATE")
                self._connection.execute("PRAGMA synchronous = FULL")
            elif path.exists():
                self._copy()
            self._check()
            stack.pop_all()

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What a query finds. It waits for a commit that is under way."""
        with self._lock, self._told():
            return self._connection.execute(query, values).fetchall()

    def write(self, *statements: Statement) -> None:
        """Have these done in one commit, after those before. They are on the disk, and found, after the next one."""
        self._pending += statements

    def commit_soon(self) -> asyncio.Task[None]:
        """Begin a commit of all that is written by then. Those that want one at a time share it: it takes longer."""
        if self._next_commit is None:
            self._next_commit = asyncio.create_task(self._commit_next())
        return self._next_commit

    async def synced(self) -> None:
        """Return when all that is written is on the disk."""
        await asyncio.shield(self.commit_soon())
        if self._failure is not None:
            raise self._failure

    def commit(self) -> None:
        """Put all that is written on the disk."""
        self._run_pending()
        self._commit()

    def close(self) -> None:
        """Commit, and close the file."""
        with closing(self._connection):
            if self._failure is None:
                self.commit()

    async def _commit_next(self) -> None:
        async with self._one_commit:
            self._next_commit = None  # what is written from here on waits for the next one
            if self._failure is None:  # else what was to be committed then is missing
                try:
                    self._run_pending()
                    await asyncio.to_thread(self._commit)
                except ComposerPrimeError as error:
                    self._failure = error

    def _run_pending(self) -> None:
        pending, self._pending = self._pending, []
        with self._lock, self._told():
            for statement, values in pending:
                self._connection.execute(statement, values)

    def _commit(self) -> None:
        with self._lock, self._told():
            self._connection.commit()

    def _copy(self) -> None:
        # Not mode=ro: after a kill within a commit, opening the file for writing undoes that commit.
        with closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=rw", uri=True, timeout=BUSY_S)) as source:
            source.execute("SELECT * FROM sqlite_master").fetchall()  # waits BUSY_S at most; `backup` waits for ever
            source.backup(self._connection)

    def _check(self) -> None:
        ((number,),) = self._connection.execute("PRAGMA application_id")
        ((num_tables,),) = self._connection.execute("SELECT COUNT(*) FROM sqlite_master")
        if not (number or num_tables):
            self._connection.executescript(_TABLES)
        elif number != APPLICATION_ID:
            raise BadInput(f"{self._path} isn't a file of answers that this version writes: ask into another folder")
        elif (fault := self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(fault)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise SystemRefused(
                f"{self._path}: {error}: give it room and this user access, or end what else uses it; then give the "
                "same command again"
            ) from None
        except sqlite3.DatabaseError as error:
            raise BadInput(
                f"{self._path} is damaged or isn't a database ({error}): restore it, or ask into another folder"
            ) from None
