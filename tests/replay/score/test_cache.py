"""The cache of scores: when a teacher is asked, and what becomes of damaged entries."""

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest

from composer_prime.errors import TeacherError
from composer_prime.replay.score.cache import ScoreCache, key_of
from composer_prime.replay.score.candidates import Candidates

from .drawn import draw, same

TOKENS = [5, 6, 7, 8]


class Teacher:
    """Counts how often it is asked."""

    def __init__(self, seed: int) -> None:
        self.scores = draw(np.random.default_rng(seed), len(TOKENS), 3, 100, absent=0)
        self.num_asked = 0

    async def ask(self) -> Candidates:
        self.num_asked += 1
        return self.scores


def test_a_hit_gives_what_the_first_answer_gave_without_asking(tmp_path: Path) -> None:
    teacher = Teacher(0)
    first = asyncio.run(ScoreCache(tmp_path).score("a", 3, TOKENS, teacher.ask))
    again = asyncio.run(ScoreCache(tmp_path).score("a", 3, TOKENS, teacher.ask))
    assert teacher.num_asked == 1
    assert same(first, again)
    assert set(first.ids[0].tolist()) == set(teacher.scores.ids[0].tolist())


def test_a_second_teacher_on_the_same_tokens_is_asked_once_and_keeps_the_firsts(tmp_path: Path) -> None:
    cache, one, two = ScoreCache(tmp_path), Teacher(0), Teacher(1)
    for _ in range(2):
        found = [asyncio.run(cache.score(name, 3, TOKENS, by.ask)) for name, by in (("a", one), ("b", two))]
        assert not same(*found)
    assert (one.num_asked, two.num_asked) == (1, 1)


def test_keys_differ_by_teacher_k_and_every_token() -> None:
    asked = [("a", 3, [1, 2]), ("b", 3, [1, 2]), ("a", 4, [1, 2]), ("a", 3, [2, 1]), ("a", 3, [1, 2, 0]), ("a", 3, [])]
    assert len({key_of(*each) for each in asked}) == len(asked)


def test_a_key_is_the_same_for_a_list_and_an_array() -> None:
    assert key_of("a", 3, TOKENS) == key_of("a", 3, np.array(TOKENS).tolist()) == key_of("a", 3, tuple(TOKENS))


@pytest.mark.parametrize("damage", [b"", b"nonsense" * 9])
def test_a_damaged_entry_is_a_miss_with_a_warning_and_is_replaced(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache, teacher = ScoreCache(tmp_path), Teacher(0)
    first = asyncio.run(cache.score("a", 3, TOKENS, teacher.ask))
    cache.path("a", 3, TOKENS).write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert cache.get("a", 3, TOKENS) is None
    assert "damaged, the teacher is asked again" in caplog.text
    assert same(asyncio.run(cache.score("a", 3, TOKENS, teacher.ask)), first)
    assert teacher.num_asked == 2
    assert cache.get("a", 3, TOKENS) is not None


def test_an_entry_of_another_sequence_is_a_miss(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    cache.put("a", 3, TOKENS, Teacher(0).scores)
    other = cache.path("a", 3, [1])
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(cache.path("a", 3, TOKENS).read_bytes())
    assert cache.get("a", 3, [1]) is None


def test_scores_of_another_shape_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"scores of shape \(4, 3\), not \(4, 8\)"):
        ScoreCache(tmp_path).put("a", 8, TOKENS, Teacher(0).scores)
    assert list(tmp_path.iterdir()) == []


def test_a_teacher_that_fails_stores_nothing(tmp_path: Path) -> None:
    async def fail() -> Candidates:
        raise TeacherError("out")

    with pytest.raises(TeacherError):
        asyncio.run(ScoreCache(tmp_path).score("a", 3, TOKENS, fail))
    assert list(tmp_path.iterdir()) == []


def test_only_whole_entries_lie_in_the_folder(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    for _ in range(3):
        cache.put("a", 3, TOKENS, Teacher(0).scores)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [cache.path("a", 3, TOKENS)]
