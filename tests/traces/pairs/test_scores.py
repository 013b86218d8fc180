"""Step scores as advantages of a session's turns."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.traces.pairs.file import Pair, StepScore
from composer_prime.traces.pairs.scores import session_scores, turn_advantages


def test_a_turns_advantage_is_its_distance_from_the_mean_over_the_largest() -> None:
    assert turn_advantages([1.0, 0.5, 0.0, 0.5]) == [1.0, 0.0, -1.0, 0.0]
    assert turn_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_a_turn_without_a_score_has_no_advantage_and_takes_no_part() -> None:
    assert turn_advantages([None, 1.0, None, 0.0]) == [None, 1.0, None, -1.0]
    assert turn_advantages([None]) == [None] and turn_advantages([]) == []


def test_equal_scores_give_none_an_advantage_also_when_they_are_rounded() -> None:
    assert turn_advantages([0.1] * 3) == [0.0] * 3
    assert turn_advantages([0.1 + 0.2, 0.3, None]) == [0.0, 0.0, None]
    assert turn_advantages([0.7]) == [0.0]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.none() | st.floats(0, 1), max_size=30))
def test_advantages_lie_within_one_keep_the_order_and_add_up_to_zero(scores: list[float | None]) -> None:
    found = turn_advantages(scores)
    known = [(score, one) for score, one in zip(scores, found, strict=True) if score is not None and one is not None]
    assert len(known) == sum(score is not None for score in scores) and found.count(None) == scores.count(None)
    assert all(-1 <= one <= 1 for _, one in known) and abs(sum(one for _, one in known)) < 1e-6
    ordered = [one for _, one in sorted(known)]
    assert ordered == sorted(ordered)


def test_scores_are_laid_out_by_session_and_turn() -> None:
    pair = Pair(state="x", messages=[], tools=[], chosen={}, rejected={}, weight=1.0, teachers={})
    scores = [
        StepScore(session=name, turn=turn, state="x", score=score)
        for name, turn, score in (("b", 2, 0.5), ("a", 0, 1.0), ("b", 0, 0.25))
    ]
    assert session_scores([scores[0], pair, *scores[1:]]) == {"b": [0.25, None, 0.5], "a": [1.0]}
