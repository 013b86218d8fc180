"""The PAIRS file: what is written is read again, whole or not at all, and a bad line is named."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.pairs.file import Decision, TeacherVote, read_decisions, write_decisions

OTHERWISE = Decision(
    session="s",
    turn=3,
    state="0123456789abcdef",
    score=1 / 3,
    supported=0.5,
    support=2 / 3,
    chosen={"role": "assistant", "content": "日本語 \ud800 \u2028 🙂"},
    teachers={"t": TeacherVote(model="m", weight=0.25, chose="agreed", circular="student")},
)
OPEN = Decision(
    session="s", turn=4, state="0123456789abcdef", score=0.5, supported=None, support=None, chosen=None, teachers={}
)


def test_decisions_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    write_decisions(path, [OPEN, OTHERWISE, OPEN])
    assert list(read_decisions(path)) == [OPEN, OTHERWISE, OPEN]
    for line in path.read_bytes().splitlines():
        assert line.isascii() and json.loads(line).keys() == Decision.model_fields.keys()


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    write_decisions(path, [OPEN])

    def dies() -> Iterator[Decision]:
        yield OTHERWISE
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_decisions(path, dies())
    assert list(read_decisions(path)) == [OPEN]
    write_decisions(path, [OTHERWISE])
    assert list(read_decisions(path)) == [OTHERWISE] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"support": 0}, "support"),
        ({"support": 1.5}, "support"),
        ({"support": math.nan}, "support"),
        ({"chosen": "a"}, "chosen"),
        ({"more": 1}, "more"),
        ({"turn": -1}, "turn"),
        ({"score": 1.1}, "score"),
        ({"supported": 2}, "supported"),
        ({"teachers": {"t": {"model": "m", "weight": 1, "chose": "mine"}}}, "teachers.t.chose"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (OPEN.model_dump(), OTHERWISE.model_dump() | change)))
    with pytest.raises(BadInput) as refused:
        list(read_decisions(path))
    assert f"{path}, line 2, is no decision ({told}: " in str(refused.value) and "\n" not in str(refused.value)


def test_a_truncated_an_empty_and_a_missing_file_are_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    with pytest.raises(BadInput, match=r"pairs.jsonl can't be read: .*: make it with `composer-prime replay pairs`"):
        list(read_decisions(path))
    path.write_bytes(b"")
    with pytest.raises(BadInput, match=r"pairs.jsonl is empty: make it with"):
        list(read_decisions(path))
    write_decisions(path, [OPEN, OTHERWISE])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadInput, match=r"pairs.jsonl, line 2, is no decision \(.*make the file again"):
        list(read_decisions(path))
    path.write_bytes(b"\xff\n")
    with pytest.raises(BadInput, match=r"line 1, is no decision"):
        list(read_decisions(path))


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gone/pairs.jsonl can't be written: .* name a file in a folder that is there"):
        write_decisions(tmp_path / "gone" / "pairs.jsonl", [OPEN])
