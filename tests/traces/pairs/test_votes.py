"""Consensus, the weights behind it, who is too close to the student or the author, and the score of a step."""

from collections.abc import Sequence

import pytest

from composer_prime.traces.answers import Answer
from composer_prime.traces.pairs.actions import action_key
from composer_prime.traces.pairs.families import Circularity, model_families
from composer_prime.traces.pairs.votes import Consensus, Rules, Vote, VoteRule, consensus_of, decide
from composer_prime.traces.states import TraceState
from tests.traces.pairs.building import answer, call, calls, says, state

QUESTION = state("what now?", says("nothing"))


def votes(
    rule: VoteRule, answers: list[Answer], at: TraceState = QUESTION, student: str | None = None
) -> Sequence[Vote]:
    return decide(at, answers, Rules(rule, circularity=Circularity(student))).votes


def decided(found: Consensus | None) -> tuple[str, float] | None:
    return None if found is None else (found.action["content"], round(found.support, 6))


def test_a_plurality_wins_whatever_the_teachers_weights() -> None:
    said = [answer(QUESTION, "a", "left", weight=9.0), answer(QUESTION, "b", "right"), answer(QUESTION, "c", "right")]
    assert decided(consensus_of(votes("plurality", said), 0.5)) == ("right", 0.666667)


def test_the_heavier_side_wins_a_weighted_vote() -> None:
    said = [answer(QUESTION, name, "left", weight=4.5) for name in "ab"] + [answer(QUESTION, n, "right") for n in "cde"]
    assert decided(consensus_of(votes("weighted", said), 0.5)) == ("left", 0.75)
    assert decided(consensus_of(votes("plurality", said), 0.5)) == ("right", 0.6)


def test_one_vote_is_no_consensus_whatever_its_weight_unless_the_user_says_so() -> None:
    alone = votes("weighted", [answer(QUESTION, "a", "left")])
    heavy = votes("weighted", [answer(QUESTION, "a", "left", weight=9.0), *(answer(QUESTION, n, "up") for n in "bc")])
    for said in (alone, heavy):
        assert consensus_of(said, 0.5) is None and decided(consensus_of(said, 0.5, min_votes=1)) is not None
    pair = votes("plurality", [answer(QUESTION, name, "left") for name in "ab"])
    assert decided(consensus_of(pair, 0.5)) == ("left", 1.0) and consensus_of(pair, 0.5, min_votes=3) is None


def test_answers_are_read_from_each_sessions_own_folder() -> None:
    states = [state("read", says("x"), cwd=cwd) for cwd in ("/a", "/b")]
    said = [answer(states[0], "t", calls(call("read", {"path": "/a/f"})))]
    here, there = (decide(one, said, Rules()).votes[0].key for one in states)
    assert here == action_key(calls(call("read", {"path": "f"})), [], "/a") != there


def test_a_tie_is_no_consensus_also_when_sums_are_rounded() -> None:
    said = [answer(QUESTION, "a", "left"), answer(QUESTION, "b", "right")]
    assert consensus_of(votes("plurality", said), 0.0) is None
    thirds = [answer(QUESTION, name, "left", weight=0.1) for name in "abc"] + [answer(QUESTION, "d", "no", weight=0.3)]
    assert consensus_of(votes("weighted", thirds), 0.0) is None


def test_support_below_the_least_is_no_consensus_and_just_the_least_is_one() -> None:
    said = [answer(QUESTION, name, text) for name, text in zip("abcd", ("left", "left", "up", "down"), strict=True)]
    assert decided(consensus_of(votes("plurality", said), 0.5)) == ("left", 0.5)
    assert consensus_of(votes("plurality", said), 0.51) is None
    assert consensus_of([], 0.0) is None


def test_the_winner_speaks_in_its_weightiest_teachers_words() -> None:
    said = [
        answer(QUESTION, "a", "LEFT"),
        answer(QUESTION, "b", "Left", weight=2.0),
        answer(QUESTION, "c", "left", weight=2.0),
    ]
    assert decided(consensus_of(votes("weighted", said), 0.5)) == ("Left", 1.0)
    assert decided(consensus_of(votes("plurality", said), 0.5)) == ("LEFT", 1.0)


def test_a_teacher_of_the_students_or_the_authors_family_counts_for_a_quarter() -> None:
    at = state("what now?", says("nothing"), author="claude-sonnet-4-5")
    said = [
        answer(at, "a", "left", model="openrouter/anthropic/claude-opus-4"),
        answer(at, "b", "right", model="Qwen/Qwen3-32B"),
        answer(at, "c", "up", model="gpt-5.1"),
    ]
    found = votes("weighted", said, at, student="qwen2.5-7b-instruct")
    assert [(vote.weight, vote.circular) for vote in found] == [(0.25, "author"), (0.25, "student"), (1.0, None)]
    assert [vote.circular for vote in votes("weighted", said, at)] == ["author", None, None]


@pytest.mark.parametrize(
    ("model", "families"),
    [
        ("openrouter/anthropic/claude-3.7-sonnet", {"claude"}),
        ("Qwen/QwQ-32B", {"qwen"}),
        ("meta-llama/Llama-3.3-70B-Instruct", {"llama"}),
        ("ollama/qwen3:8b", {"qwen"}),
        ("llama.cpp/gemma-3", {"gemini"}),
        ("served/gpt-oss-120b", {"gpt"}),
        ("o3-mini", {"gpt"}),
        ("google/gemini-2.5-pro", {"gemini"}),
        ("mistralai/Mixtral-8x7B", {"mistral"}),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", {"deepseek", "qwen"}),
        ("moonshotai/Kimi-K2", {"kimi"}),
        ("x-ai/grok-4", {"grok"}),
        ("outputs/runs/My-Policy", {"my-policy"}),
    ],
)
def test_a_family_is_read_from_a_models_name_whoever_serves_it(model: str, families: set[str]) -> None:
    assert model_families(model) == families


def test_models_of_no_known_family_are_compared_by_name() -> None:
    assert Circularity("runs/my-policy").shared_with("served/My-Policy", None) == "student"
    assert Circularity("runs/my-policy").shared_with("other", "another") is None


# --- the score of the author's action: the share of the votes itself, as far as the votes carry it --------------------

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


def test_as_many_votes_are_needed_as_the_user_says() -> None:
    assert carried("left", min_votes=1) == 1.0 and carried("up", min_votes=1) == 0.0
    assert carried("left", "left", min_votes=3) is None and carried("left", "left", "up", min_votes=3) == 0.5
