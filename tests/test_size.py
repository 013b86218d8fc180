"""No number of `python -m tests.size` gets worse than tests/size.toml says, and the numbers are counted as they say."""

import ast
import tomllib
from pathlib import Path

import pytest

from tests import size
from tests.words import old_names, old_words


def test_no_number_goes_the_wrong_way() -> None:
    assert size.worse(size.measure()) == []


def test_every_raise_says_its_number_its_issue_and_what_takes_it_back() -> None:
    read = tomllib.loads(size.LIMITS.read_text(encoding="utf-8"))
    for raised in read.get("raised", ()):
        assert raised.keys() == {"number", "by", "issue", "until"} and raised["number"] in read["at_most"]


def test_a_worse_number_is_named_with_its_limit_and_a_better_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = tmp_path / "size.toml"
    raised = '[[raised]]\nnumber = "files"\nby = 2\nissue = 46\nuntil = "the old ones go"\n'
    limits.write_text(f'# why\n[at_most]\n"lines (all)" = 50\n"files" = 5\n\n{raised}')
    monkeypatch.setattr(size, "LIMITS", limits)
    assert size.worse({"lines (all)": 50, "files": 7}) == []
    assert size.worse({"lines (all)": 51, "files": 7})[0].startswith("lines (all) (51) must be at most 50: ")
    size.tighten({"lines (all)": 40, "files": 6})
    assert limits.read_text() == f'# why\n[at_most]\n"lines (all)" = 40\n"files" = 5\n\n{raised}'


@pytest.mark.parametrize(
    ("program", "reached"),
    [
        ("self._own", False),
        ("loop.__class__", False),
        ("loop._members", True),
        ("patch.setattr(loop, '_members', [])", True),
        ("patch.setattr('composer_prime.sync.loop._bring', None)", True),
        ("from composer_prime.sync.loop import _bring", True),
        ("from composer_prime.sync.loop import bring", False),
    ],
)
def test_reaching_into_private_names_is_seen(program: str, reached: bool) -> None:
    assert any(size.reaches(node) for node in ast.walk(ast.parse(program))) == reached


def test_a_name_counts_once_with_each_old_word_in_it(tmp_path: Path) -> None:
    (tmp_path / "journal.py").touch()
    program = (
        "class MasterBytes:\n    def read(self, masters, place, mastery):\n        self._masters = 1\nclass Place: 1"
    )
    assert old_names(tmp_path, [ast.parse(program)]) == {"journal", "MasterBytes", "masters", "_masters", "Place"}
    assert old_words("The courier's masters, and a Courier; a place.") == 3
