"""Step scores: by the share of the votes itself, as far as the votes carry it."""

import pytest

from composer_prime.traces.pairs.families import Circularity
from composer_prime.traces.pairs.votes import Rules, decide
from tests.traces.pairs.building import answer, says, state

AT = state("what now?", says("left"), author="claude-sonnet-4-5")


def carried(*said: str, weights: tuple[float, ...] = (), models: tuple[str, ...] = (), min_votes: int = 2):
    """The supported score of the author's "left" where teachers say this, of equal weight and no known family."""
    answers = [
        answer(AT, f"t{n}", text, weight=(*weights, *[1.0] * 9)[n], model=(*models, *"abcdefghi")[n])
        for n, text in enumerate(said)
    ]
    rules = Rules("weighted", min_votes=min_votes, circularity=Circularity("qwen3-8b"))
    return decide(AT, answers, rules).supported


def test_a_score_is_carried_by_two_votes_for_one_action() -> None:
    assert carried("left", "left") == 1.0 and carried("left", "left", "up") == pytest.approx(2 / 3)
    assert carried("up", "up") == 0.0 and carried("left", "up", "up") == pytest.approx(1 / 3)


def test_one_vote_is_no_score_and_votes_for_as_many_actions_speak_neither_for_nor_against() -> None:
    assert carried("left") is None and carried("up") is None
    assert carried("up", "down") == carried("left", "up") == carried("left", "up", "down") == 0.5
    assert carried("left", "left", "up", "down", "off") == 0.5


def test_a_teachers_weight_is_no_second_vote() -> None:
    assert carried("left", "up", "down", weights=(9.0,)) == 0.5
    assert carried("left", "left", "up", weights=(1.0, 1.0, 9.0)) == 0.5


def test_votes_of_the_students_or_the_authors_family_alone_carry_nothing() -> None:
    near = ("claude-opus-4", "qwen3-32b")
    assert carried("left", "left", models=near) == carried("up", "up", models=near) == 0.5
    assert carried("left", "left", "left", models=near) == 1.0 and carried("up", "up", "up", models=near) == 0.0


def test_as_many_votes_are_needed_as_the_user_says() -> None:
    assert carried("left", min_votes=1) == 1.0 and carried("up", min_votes=1) == 0.0
    assert carried("left", "left", min_votes=3) is None and carried("left", "left", "up", min_votes=3) == 0.5
