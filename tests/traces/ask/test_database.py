"""The file of answers: whole after a kill at any byte, read while it is written, one line where it is damaged."""

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from composer_prime.errors import BadInput, SystemRefused
from composer_prime.traces.ask.database import Database
from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ask.plan import make_plan
from composer_prime.traces.ask.prices import NANO
from composer_prime.traces.ask.report import forecast
from tests.architecture import REPOSITORY
from tests.traces.ask.text_teacher import FakeTextTeacher, Listed, trace

STATES = [trace(number) for number in range(6)]
WRITE = "INSERT INTO hosts VALUES (?)"
PAIRS = f"""
import sys
from pathlib import Path
from composer_prime.traces.ask.database import Database

database = Database(Path(sys.argv[1]))
for number in range(4):
    database.write(*(({WRITE!r}, (f"{{half}}{{number}}" + "x" * 3000,)) for half in "ab"))
    database.commit()
    print(number, flush=True)
"""
"""Commits four pairs of rows, and says when each is on the disk."""

ANSWER = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from composer_prime.traces.ask.folder import AnswerFolder


async def run():
    with AnswerFolder(Path(sys.argv[1])).held([], 1000) as opened:
        call = await opened.ledger.reserve("k", "a", "m", 30)
        opened.keep("s", "s", replace(call, outcome="answered", settled_nano_usd=7), {"content": "x" * 9000}, None)
        await opened.database.synced()


asyncio.run(run())
"""
"""Reserves a call, and keeps its answer."""


def hosts(path: Path) -> list[str]:
    with closing(Database(path, is_copy=True)) as database:
        return [host[:2] for (host,) in database.rows("SELECT host FROM hosts ORDER BY rowid")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.sqlite"


@pytest.mark.slow
def test_whatever_write_a_process_dies_at_its_commits_are_there_whole_and_half_a_one_never(tmp_path, die_at):
    draw, place, code, num_halfway = random.Random(0), 0, -signal.SIGKILL, 0
    while code == -signal.SIGKILL:
        folder = tmp_path / str(place)
        folder.mkdir()
        command = [sys.executable, "-c", PAIRS, str(folder / "answers.sqlite")]
        env = die_at(place, draw.random())
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
        code, num_told = done.returncode, len(done.stdout.split())
        journal = folder / "answers.sqlite-journal"
        num_halfway += journal.exists() and journal.stat().st_size > 0
        found = hosts(folder / "answers.sqlite")
        pairs = [[f"{half}{n}" for n in range(most) for half in "ab"] for most in (num_told, num_told + 1)]
        assert found in pairs, place
        with closing(Database(folder / "answers.sqlite")) as database:  # and it goes on
            database.write((WRITE, ("more",)))
        assert hosts(folder / "answers.sqlite") == [*found, "mo"]
        place += 1
    assert code == 0 and num_told == 4 and place > 30 and num_halfway > 10


@pytest.mark.slow
def test_whatever_write_a_process_dies_at_an_answer_is_there_with_its_cost_or_neither_is(tmp_path, die_at):
    place, code, seen = 0, -signal.SIGKILL, set[tuple[str, ...]]()
    while code == -signal.SIGKILL:
        folder = tmp_path / str(place)
        command = [sys.executable, "-c", ANSWER, str(folder)]
        code = subprocess.run(command, cwd=REPOSITORY, env=die_at(place, 0.5)).returncode
        with AnswerFolder(folder).copied() as copy:
            outcomes = tuple(record.outcome for record in copy.ledger.records())
            assert copy.kept == ({"k": (7, True)} if outcomes == ("answered",) else {}), place
            assert copy.ledger.committed == {(): 0, ("reserved",): 30, ("answered",): 7}[outcomes]
        seen.add(outcomes)
        place += 1
    assert code == 0 and seen == {(), ("reserved",), ("answered",)}


def test_callers_that_wait_at_once_share_commits(path):
    statements: list[str] = []

    async def write(database: Database, number: int) -> None:
        database.write((WRITE, (f"{number}",)))
        await database.synced()
        assert f"{number}" in hosts(path)

    async def run(database: Database) -> None:
        await asyncio.gather(*(write(database, number) for number in range(10, 60)))

    with closing(Database(path)) as database:
        database._connection.set_trace_callback(statements.append)
        asyncio.run(run(database))
    assert len(hosts(path)) == 50 and 1 <= statements.count("COMMIT") <= 25


def test_a_commit_that_fails_is_told_to_all_that_wait_and_nothing_is_written_after_it(path):
    async def write(database: Database, text: str) -> None:
        database.write((WRITE, (text,)))
        await database.synced()

    async def run(database: Database) -> None:
        told = await asyncio.gather(*(write(database, f"{n}" + "x" * 90_000) for n in range(9)), return_exceptions=True)
        assert all(isinstance(one, SystemRefused) and "is full" in str(one) for one in told)
        with pytest.raises(SystemRefused, match="is full"):
            await write(database, "small")

    with closing(Database(path)) as database:
        database._connection.execute("PRAGMA max_page_count = 20")
        asyncio.run(run(database))
    assert hosts(path) == []


def test_nothing_is_sent_once_the_disk_is_full(serve, asking, tmp_path, monkeypatch):
    fake, init = FakeTextTeacher(), Database.__init__

    def small(self: Database, path: Path, is_copy: bool = False) -> None:
        init(self, path, is_copy)
        self._connection.execute("PRAGMA max_page_count = 16")

    monkeypatch.setattr(Database, "__init__", small)
    states = [trace(number) for number in range(200)]
    with pytest.raises(SystemRefused, match=r"answers.sqlite: database or disk is full.*same command again"):
        asking(states, [serve(fake)])
    monkeypatch.undo()
    records = AnswerFolder(tmp_path / "answers").ledger()
    assert 0 < len(fake.bodies) < 200 and fake.costs.keys() <= {record.call for record in records}
    paid = (record.usd_reserved if record.usd_settled is None else record.usd_settled for record in records)
    assert sum(paid) >= fake.served_usd - 1e-12
    assert asking(states, [serve(fake)]).is_complete


def test_a_reader_holds_a_commit_up_and_breaks_nothing(path):
    with closing(Database(path)) as database, closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert not reader.execute("SELECT * FROM hosts").fetchall()
        database.write((WRITE, ("a0",)))
        commit = threading.Thread(target=database.commit)
        commit.start()
        commit.join(0.2)
        assert commit.is_alive() and not reader.execute("SELECT * FROM hosts").fetchall()
        reader.execute("COMMIT")
        commit.join(60)
        assert hosts(path) == ["a0"]


def scribble(path: Path) -> None:
    """Other bytes in all pages but the first."""
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_text(path: Path) -> None:
    path.write_text("answers\n" * 1000)


def replace(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE calls (a)")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pages that hold something else": (scribble, r"is damaged .*restore it, or ask into another folder"),
    "half of it": (cut, r"is damaged .*restore it, or ask into another folder"),
    "a text": (write_text, r"isn't a database .*restore it, or ask into another folder"),
    "another database": (replace, r"isn't a file of answers .*ask into another folder"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_or_foreign_file_is_one_line_for_whoever_opens_it_and_stays_as_it_is(serve, asking, tmp_path, kind):
    fake = FakeTextTeacher()
    teacher = serve(fake)
    asking(STATES, [teacher])
    damage, words = DAMAGES[kind]
    file = tmp_path / "answers" / "answers.sqlite"
    damage(file)
    damaged, folder = file.read_bytes(), AnswerFolder(tmp_path / "answers")
    plan = make_plan(Listed(STATES))
    for use in (
        lambda: asking(STATES, [teacher]),
        lambda: list(folder.answers()),
        folder.ledger,
        lambda: forecast(plan, [teacher], folder.root),
    ):
        with pytest.raises(BadInput, match=words) as found:
            use()
        assert "\n" not in str(found.value) and str(file) in str(found.value)
    assert file.read_bytes() == damaged and len(fake.bodies) == 6


@pytest.mark.parametrize("name", ["answers.jsonl", "ledger.jsonl"])
def test_a_folder_of_the_old_form_is_refused_with_the_remedy(serve, asking, tmp_path, name):
    root, fake = tmp_path / "answers", FakeTextTeacher()
    root.mkdir()
    (root / name).write_text("{}\n")
    plan = make_plan(Listed(STATES))
    teacher = serve(fake)
    for use in (
        lambda: asking(STATES, [teacher]),
        lambda: list(AnswerFolder(root).answers()),
        lambda: forecast(plan, [teacher], root),
    ):
        with pytest.raises(BadInput, match=rf"of an earlier version \({name}\): ask into another folder"):
            use()
    assert [one.name for one in root.iterdir()] == [name] and not fake.bodies


def test_a_file_that_a_kill_left_empty_is_begun_again(serve, asking, tmp_path):
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "answers.sqlite").touch()
    assert AnswerFolder(tmp_path / "answers").ledger() == ()
    assert asking(STATES, [serve(FakeTextTeacher())]).is_complete


def test_a_file_that_cannot_be_opened_is_what_the_system_refused(tmp_path):
    (tmp_path / "answers" / "answers.sqlite").mkdir(parents=True)
    with pytest.raises(SystemRefused, match=r"answers.sqlite: unable to open"):
        AnswerFolder(tmp_path / "answers").ledger()
    with (
        pytest.raises(SystemRefused, match=r"answers.sqlite: unable to open"),
        AnswerFolder(tmp_path / "answers").held([], NANO),
    ):
        pass
