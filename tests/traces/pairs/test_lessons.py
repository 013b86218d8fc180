"""What is learned at a point: the agreed action beside the author's, of the store that the decisions are of."""

from pathlib import Path

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.pairs.lessons import read_lessons, step_advantages
from composer_prime.traces.pairs.making import make_pairs
from composer_prime.traces.pairs.votes import Rules
from composer_prime.traces.states import TraceState
from tests.traces.pairs.building import Listed, answer, says, state


def decided(tmp_path: Path, states: list[TraceState], said: dict[int, str]) -> Path:
    """The file of decisions where three teachers say this at turns."""
    answers = [answer(states[turn], name, text) for turn, text in said.items() for name in "abc"]
    make_pairs(Listed(states), answers, Rules(), to=tmp_path / "pairs.jsonl")
    return tmp_path / "pairs.jsonl"


def turns(count: int) -> list[TraceState]:
    return [state(f"turn {turn}", {**says("did"), "reasoning_content": "Hm."}, turn=turn) for turn in range(count)]


def test_a_lesson_has_what_was_seen_and_both_actions_without_thinking(tmp_path: Path) -> None:
    states = turns(3)
    other, same = read_lessons(Listed(states), decided(tmp_path, states, {0: "better", 2: "did"}))
    assert (other.state, other.chosen, other.rejected, other.weight) == (states[0], says("better"), says("did"), 1.0)
    assert (same.state, same.chosen, same.rejected, same.weight) == (states[2], says("did"), None, 1.0)


def test_the_same_actions_at_the_same_point_of_several_sessions_are_one_lesson(tmp_path: Path) -> None:
    again = [state("turn 0", says("did"), session="t", turn=9), state("turn 0", says("didn't"), session="u", turn=4)]
    states = [*turns(1), *again]
    lessons = list(read_lessons(Listed(states), decided(tmp_path, states, {0: "better"})))
    assert [lesson.rejected and lesson.rejected["content"] for lesson in lessons] == ["did", "didn't"]


def test_a_file_without_an_agreement_or_of_another_store_is_refused(tmp_path: Path) -> None:
    states = turns(2)
    answers = [answer(states[0], "a", "left"), answer(states[0], "b", "right")]
    make_pairs(Listed(states), answers, Rules(), to=tmp_path / "torn.jsonl")
    with pytest.raises(BadInput, match=r"torn.jsonl has no action that teachers agree on: ask more teachers"):
        list(read_lessons(Listed(states), tmp_path / "torn.jsonl"))
    file = decided(tmp_path, states, {0: "better"})
    with pytest.raises(BadInput, match=r"none of the 1 agreements of .* is of a point of the store: give its own"):
        list(read_lessons(Listed([state("else", says("did"))]), file))


def test_an_advantage_is_the_turns_own_whatever_the_sessions_others_are(tmp_path: Path) -> None:
    states = turns(4)
    assert set(step_advantages(decided(tmp_path, states, dict.fromkeys(range(4), "did"))).values()) == {1.0}
    answers = [answer(one, name, "did") for one in states[:3] for name in "abc"]
    answers += [answer(states[3], name, text) for name, text in zip("abc", ("did", "did", "no"), strict=True)]
    make_pairs(Listed(states), answers, Rules(), to=tmp_path / "pairs.jsonl")
    found = step_advantages(tmp_path / "pairs.jsonl")
    assert found == pytest.approx({("s", 0): 1.0, ("s", 1): 1.0, ("s", 2): 1.0, ("s", 3): 1 / 3})
