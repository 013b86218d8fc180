"""`composer-prime replay pairs`: what it prints, writes and refuses."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from composer_prime.traces.answers import Answer
from composer_prime.traces.pairs.file import read_decisions
from tests.cli.command_line import call as command
from tests.traces.pairs.building import Listed, answer, says, state

ONE = state("what now?", says("nothing"), author="gpt-4o")
ANSWERS = [
    answer(ONE, "a", "left", model="qwen3-32b"),
    answer(ONE, "b", "left", model="qwen3-8b"),
    answer(ONE, "c", "right", weight=0.3),
    answer(ONE, "d", "left", weight=0.1),
]


class ListedAnswers:
    """A folder of answers that is a list."""

    def __init__(self, folder: Path) -> None:
        self._answers = ANSWERS if folder.name == "answers" else []

    def answers(self) -> list[Answer]:
        return self._answers


@pytest.fixture
def replay_pairs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The command in a folder of its own, with lists in place of a store and of a folder of answers."""
    for name, listed in (
        ("ingest.store", {"TraceStore": lambda folder: Listed([ONE])}),
        ("ask.folder", {"AnswerFolder": ListedAnswers}),
    ):
        module = ModuleType(name)
        module.__dict__.update(listed)
        monkeypatch.setitem(sys.modules, f"composer_prime.traces.{name}", module)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: command(capsys, monkeypatch, "replay", "pairs", *arguments)


def test_the_command_writes_pairs_and_prints_the_counts(replay_pairs, tmp_path: Path) -> None:
    answered = replay_pairs("store", "answers", "--to", "pairs.jsonl")
    assert (answered.code, answered.err) == (0, "")
    lines = answered.out.splitlines()
    counts = [line.split() for line in lines[:5]]
    assert [one[-1] for one in counts] == ["1", "1", "0", "1", "0"] and counts[3][0] == "otherwise"
    assert lines[5].startswith("teacher        a (qwen): answers 1") and "the student is unknown" in lines[-1]
    (found,) = read_decisions(tmp_path / "pairs.jsonl")
    assert found.chosen is not None and found.chosen["content"] == "left"


def test_votes_student_and_support_are_those_of_the_options(replay_pairs, tmp_path: Path) -> None:
    options = ("--vote", "weighted", "--student-model", "Qwen/Qwen3-0.6B")
    answered = replay_pairs("store", "answers", "--to", "pairs.jsonl", *options)
    assert "circularity    a shares the student's model family: weight times 0.25, states 1" in answered.out
    (found,) = read_decisions(tmp_path / "pairs.jsonl")
    assert found.support == pytest.approx(0.6 / 0.9)
    answered = replay_pairs("store", "answers", "--to", "pairs.jsonl", *options, "--min-support", "0.7")
    assert "otherwise      0" in answered.out and "no consensus   1" in answered.out


def test_as_many_votes_are_needed_and_as_much_ignored_as_the_options_say(replay_pairs) -> None:
    counts = replay_pairs("store", "answers", "--to", "pairs.jsonl", "--min-votes", "4").out.splitlines()
    assert counts[3] == "otherwise      0" and "fewer than 4 votes for any action: 1" in counts[4]
    answered = replay_pairs("store", "answers", "--to", "pairs.jsonl", "--ignore", "f.note", "--ignore", "*.why")
    assert answered.code == 0
    for wrong in ("note", ".note", "f."):
        answered = replay_pairs("store", "answers", "--to", "pairs.jsonl", "--ignore", wrong)
        assert answered.code == 2 and f"--ignore {wrong} must be TOOL.ARGUMENT" in answered.err


def test_a_dry_run_prints_the_same_and_writes_no_pairs(replay_pairs, tmp_path: Path) -> None:
    dry = replay_pairs("store", "answers", "--to", "pairs.jsonl", "--dry-run")
    assert dry.code == 0 and list(tmp_path.iterdir()) == []
    assert replay_pairs("store", "answers", "--to", "pairs.jsonl").out == dry.out
