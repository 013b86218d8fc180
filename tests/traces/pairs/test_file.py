"""The PAIRS file: what is written is read again, whole or not at all, and a bad line is named."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.pairs.file import Pair, Record, StepScore, TeacherVote, read_pairs, write_pairs

PAIR = Pair(
    state="0123456789abcdef",
    messages=[{"role": "user", "content": "日本語 \ud800 \u2028 🙂"}],
    tools=[{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}],
    chosen={"role": "assistant", "content": "a"},
    rejected={"role": "assistant", "content": "b"},
    weight=2 / 3,
    teachers={"t": TeacherVote(model="m", weight=0.25, chose="chosen", circular="student")},
)
SCORE = StepScore(session="s", turn=3, state="0123456789abcdef", score=1 / 3, supported=None)


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    write_pairs(path, [SCORE, PAIR, SCORE])
    assert list(read_pairs(path)) == [SCORE, PAIR, SCORE]
    written = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [one["kind"] for one in written] == ["score", "pair", "score"]
    assert set(written[0]) == {"kind", "session", "turn", "state", "score", "supported"}
    assert set(written[1]) == {"kind", "state", "messages", "tools", "chosen", "rejected", "weight", "teachers"}


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    write_pairs(path, [SCORE])

    def dies() -> Iterator[Record]:
        yield PAIR
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_pairs(path, dies())
    assert list(read_pairs(path)) == [SCORE]
    write_pairs(path, [PAIR])
    assert list(read_pairs(path)) == [PAIR] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": "pairs"}, "kind"),
        ({"weight": 0}, "pair.weight"),
        ({"weight": 1.5}, "pair.weight"),
        ({"weight": math.nan}, "pair.weight"),
        ({"chosen": "a"}, "pair.chosen"),
        ({"more": 1}, "pair.more"),
        ({"teachers": {"t": {"model": "m", "weight": 1, "chose": "mine"}}}, "pair.teachers.t.chose"),
        ({"kind": "score", "session": "s", "turn": -1, "state": "x", "score": 0.5, "supported": 1}, "score.turn"),
        ({"kind": "score", "session": "s", "turn": 0, "state": "x", "score": 1.1, "supported": 1}, "score.score"),
        ({"kind": "score", "session": "s", "turn": 0, "state": "x", "score": 0.5}, "score.supported"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "pairs.jsonl"
    record = change if change.get("kind") == "score" else PAIR.model_dump() | change
    path.write_text("".join(json.dumps(one) + "\n" for one in (SCORE.model_dump(), record)))
    with pytest.raises(BadInput) as refused:
        list(read_pairs(path))
    assert f"{path}, line 2, is no pair and no score (" in str(refused.value) and told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_truncated_an_empty_and_a_missing_file_are_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    with pytest.raises(BadInput, match=r"pairs.jsonl can't be read: .*: make it with `composer-prime replay pairs`"):
        list(read_pairs(path))
    path.write_bytes(b"")
    with pytest.raises(BadInput, match=r"pairs.jsonl is empty: make it with"):
        list(read_pairs(path))
    write_pairs(path, [SCORE, PAIR])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadInput, match=r"pairs.jsonl, line 2, is no pair and no score \(.*make the file again"):
        list(read_pairs(path))
    path.write_bytes(b"\xff\n")
    with pytest.raises(BadInput, match=r"line 1, is no pair"):
        list(read_pairs(path))


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gone/pairs.jsonl can't be written: .* name a file in a folder that is there"):
        write_pairs(tmp_path / "gone" / "pairs.jsonl", [SCORE])
