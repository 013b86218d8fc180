"""`composer-prime replay ask`: from a store of traces to answers, with exit codes that tell."""

import io
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from composer_prime.config.toml import to_toml
from composer_prime.traces.ask import teacher
from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.states import TraceState
from tests.cli.command_line import Answer, call
from tests.traces.ask.text_teacher import FakeTextTeacher, number_of, serving, trace
from tests.traces.ask.text_teacher import call as said


class Three:
    """A store of three decision points."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def states(self) -> Iterator[TraceState]:
        return (trace(number) for number in range(3))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Answer]:
    """`cli(fake_url, *options)` asks one teacher about the store."""
    stores = ModuleType("composer_prime.traces.ingest.store")
    stores.TraceStore = Three  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stores.__name__, stores)
    monkeypatch.setattr(teacher, "RETRY_WAIT_S", 0.0)
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def run(url: str, *options: str, ceiling: str = "1") -> Answer:
        table = FakeTextTeacher().config(url).model_dump(exclude_none=True)
        file = tmp_path / "TEACHERS.toml"
        file.write_text(to_toml({"teachers": [table]}))
        where = ("--teachers", str(file), "--to", str(tmp_path / "answers"), "--ceiling-usd", ceiling)
        return call(capsys, monkeypatch, "replay", "ask", str(tmp_path / "store"), *where, *options)

    return run


def test_teachers_are_asked_and_the_report_says_what_it_cost(cli: Callable[..., Answer], tmp_path: Path) -> None:
    fake = FakeTextTeacher()
    with serving(fake) as url:
        answer = cli(url)
    assert answer.code == 0, answer.err
    assert f"this run: 3 calls, ${fake.served_usd:.6f}" in answer.out
    assert len(list(AnswerFolder(tmp_path / "answers").answers())) == 3


def test_a_dry_run_says_calls_dollars_and_minutes_and_sends_nothing(cli: Callable[..., Answer], tmp_path: Path) -> None:
    fake = FakeTextTeacher()
    with serving(fake) as url:
        answer = cli(url, "--dry-run")
    assert answer.code == 0 and not fake.bodies and not (tmp_path / "answers").exists()
    for word in ("3 decision points", "calls: 3 to 3", "predicted: $", "worst case: $", "minutes:", "nothing was sent"):
        assert word in answer.out


def test_a_teacher_that_drops_out_makes_the_exit_code_1(cli: Callable[..., Answer]) -> None:
    with serving(FakeTextTeacher(fault=lambda number: "dead")) as url:
        answer = cli(url)
    assert answer.code == 1 and "teacher is asked no more" in answer.out


def test_what_a_person_can_fix_is_one_line_and_exit_code_2(cli: Callable[..., Answer], tmp_path: Path) -> None:
    with serving(FakeTextTeacher()) as url:
        below = cli(url, ceiling="0.000001")
        (tmp_path / "answers" / "answers.sqlite").write_bytes(b"no database")
        for answer, line in ((below, "is below one call"), (cli(url), "isn't a database")):
            assert answer.code == 2 and line in answer.err and answer.err.count("\n") == 1


def test_a_choice_of_decision_points_is_told_before_anything_is_sent(cli: Callable[..., Answer]) -> None:
    fake = FakeTextTeacher()
    with serving(fake) as url:
        told = cli(url, "--only", "tool=read_file", "--limit", "2", "--dry-run")
        assert "2 decision points, 1 more left out: --limit 2" in told.out and not fake.bodies
        none = cli(url, "--only", "tool=Bash")
        assert none.code == 2 and "3 more left out: --only tool=Bash: nothing is left" in none.err
        assert 'must be "tool=NAME"' in cli(url, "--only", "Bash").err and not fake.bodies
        assert cli(url, "--limit", "2").code == 0
    assert [number_of(body) for body in fake.bodies] == [0, 1]


def test_points_that_are_too_long_are_counted_before_money_is_spent(
    cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = trace(3, "word " * 2000)
    monkeypatch.setattr(Three, "states", lambda self: iter([*map(trace, range(3)), long]))
    fake = FakeTextTeacher()
    with serving(fake) as url:
        told = cli(url, "--seq-len", "1000", "--dry-run")
        assert "1 of 4 (25%) are longer than about 1000 tokens, with 9" in told.out
        refused = cli(url, "--seq-len", "10")
    assert refused.code == 2 and "all 4 decision points are longer than --seq-len (10)" in refused.err
    assert not fake.bodies


def test_others_servers_get_nothing_before_somebody_saw_a_request_and_agreed(
    cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("composer_prime.traces.ask.asking.is_local", lambda url: False)
    monkeypatch.setenv("DEPLOY_TOKEN", "a-token-of-mine")
    secret = trace(0, "a-token-of-mine " + "x" * 5000, said("a"))
    monkeypatch.setattr(Three, "states", lambda self: iter([secret]))
    fake = FakeTextTeacher()
    with serving(fake) as url:
        alone = cli(url)
        assert alone.code == 2 and "say --yes" in alone.err and alone.err.count("\n") == 1 and not fake.bodies
        monkeypatch.setattr("sys.stdin", Terminal("n\n"))
        no = cli(url)
        assert no.code == 2 and '"role":"system"' in no.out and "characters more" in no.out and not fake.bodies
        assert "[redacted]" in no.out and "a-token-of-mine" not in no.out and len(no.out) < 2500
        monkeypatch.setattr("sys.stdin", Terminal("y\n"))
        assert cli(url).code == 0 and len(fake.bodies) == 1
        monkeypatch.setattr("sys.stdin", Terminal(""))
        assert '"role"' not in cli(url).out  # once for a folder and server
        shutil.rmtree(tmp_path / "answers")
        assert cli(url, "--yes").code == 0 and len(fake.bodies) == 2


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        return True
