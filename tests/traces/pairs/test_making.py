"""From states and answers to the PAIRS file: what is decided, the counts, and the same bytes again."""

import random
from pathlib import Path

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.answers import Answer
from composer_prime.traces.pairs.families import Circularity
from composer_prime.traces.pairs.file import Decision, read_decisions
from composer_prime.traces.pairs.making import make_pairs
from composer_prime.traces.pairs.votes import Rules
from composer_prime.traces.states import TraceState
from tests.traces.pairs.building import Listed, answer, call, calls, says, state, tool

TOOLS = (tool("read", path={"type": "string"}, limit={"default": 100}), tool("stop"))


def session() -> tuple[list[TraceState], list[Answer]]:
    """Four turns: agreed, another action, no consensus, not asked."""
    read = calls(call("read", {"path": "a"}, id="x1"))
    wrong = {**calls(call("stop", id="x2")), "reasoning_content": "I have had enough."}
    states = [
        state(f"turn {turn}", action, turn=turn, tools=TOOLS, author="gpt-4o")
        for turn, action in enumerate((read, wrong, says("done"), says("bye")))
    ]
    better = calls(call("read", {"path": "./a", "limit": 100}, id="y"), content="I read on.")
    answers = [
        *(answer(states[0], name, better) for name in ("a", "b", "c")),
        answer(states[1], "a", better, model="qwen3-32b"),
        answer(states[1], "b", {**read, "reasoning_content": "Reading first."}, model="claude-sonnet-4-5"),
        answer(states[1], "c", calls(call("stop")), model="gpt-4.1"),
        answer(states[2], "a", "left"),
        answer(states[2], "b", "right"),
    ]
    return states, answers


def made(states: list[TraceState], answers: list[Answer], to: Path, rules: Rules | None = None) -> list[Decision]:
    make_pairs(Listed(states), answers, rules or Rules(), to=to)
    return list(read_decisions(to))


def test_each_answered_point_has_a_decision_with_the_agreed_action_where_it_is_another(tmp_path: Path) -> None:
    states, answers = session()
    first, second, third = made(states, answers, tmp_path / "pairs.jsonl")
    assert [(one.session, one.turn, one.state) for one in (first, second, third)] == [
        ("s", turn, states[turn].id) for turn in range(3)
    ]
    assert (first.score, first.supported, first.support, first.chosen) == (1.0, 1.0, 1.0, None)
    assert second.score == second.supported == pytest.approx(0.25 / 2.25)
    assert second.support == pytest.approx(2 / 2.25)
    assert (third.score, third.supported, third.support, third.chosen) == (0.0, 0.5, None, None)
    said = {name: (vote.model, vote.weight, vote.chose, vote.circular) for name, vote in second.teachers.items()}
    assert said == {
        "a": ("qwen3-32b", 1.0, "agreed", None),
        "b": ("claude-sonnet-4-5", 1.0, "agreed", None),
        "c": ("gpt-4.1", 0.25, "author", "author"),
    }
    assert {vote.chose for vote in first.teachers.values()} == {"agreed"}


def test_chosen_are_the_teachers_words_without_thinking(tmp_path: Path) -> None:
    states, answers = session()
    rules = Rules(circularity=Circularity(student="qwen3-0.6b"))
    _, second, _ = made(states, answers, tmp_path / "pairs.jsonl", rules)
    assert second.chosen == calls(call("read", {"path": "a"}, id="x1"))


def test_the_report_counts_every_state_and_tells_each_teachers_agreement(tmp_path: Path) -> None:
    states, answers = session()
    again = state("turn 1", states[1].action, session="t", tools=TOOLS, author="gpt-4o")
    stray = answer(state("elsewhere", says("x")), "a", "left")
    report = make_pairs(Listed([*states, again]), [*answers, stray, answer(states[3], "a", "")], Rules())
    assert (report.num_states, report.answered, report.agreed, report.differ) == (5, 4, 1, 2)
    assert report.lines() == [
        "states         5",
        "with answers   4 (answers left out: 1 empty, 1 for other states)",
        "as the author  1",
        "otherwise      2",
        "no consensus   1 (fewer than 2 votes for any action: 1)",
        "teacher        a (model-of-a, qwen): answers 4, 0.25 with the author, 1.00 with the consensus",
        "teacher        b (claude, model-of-b): answers 4, 0.25 with the author, 1.00 with the consensus",
        "teacher        c (gpt, model-of-c): answers 3, 1.00 with the author, 0.33 with the consensus",
        "circularity    c shares the author's model family: weight times 0.25, states 2",
        "circularity    the student is unknown, only authors were compared: name it, --student-model",
    ]


def test_what_the_students_or_the_authors_family_alone_is_for_is_not_agreed_and_counted(tmp_path: Path) -> None:
    one = state("turn 0", says("x"), author="claude-sonnet-4-5")
    rules = Rules(circularity=Circularity("qwen3-8b"))
    for said, score in (("y", 0.0), ("x", 1.0)):
        near = [answer(one, "a", said, model="claude-opus-4"), answer(one, "b", said, model="qwen3-32b")]
        (found,) = made([one], near, tmp_path / "pairs.jsonl", rules)
        assert (found.score, found.supported, found.support, found.chosen) == (score, 0.5, None, None)
        (found,) = made([one], [*near, answer(one, "c", said)], tmp_path / "pairs.jsonl", rules)
        assert found.support == 1.0 and len(found.teachers) == 3
    near = [answer(one, "a", "y", model="claude-opus-4"), answer(one, "b", "y", model="qwen3-32b")]
    assert make_pairs(Listed([one]), near, rules).lines()[3] == (
        "otherwise      1 (1 by teachers of the student's or the author's family alone: they don't count)"
    )


@pytest.mark.parametrize("vote", ["plurality", "weighted"])
def test_the_same_input_gives_the_same_bytes_in_any_order_of_answers(tmp_path: Path, vote) -> None:
    rng = random.Random(5)
    states = [state(f"turn {turn}", says(rng.choice("xyz")), turn=turn) for turn in range(40)]
    answers = [
        answer(one, f"t{n}", rng.choice("xyz"), weight=rng.random() + 0.1)
        for one in states
        for n in range(5)
        if rng.random() < 0.8
    ]
    written = []
    for number in range(3):
        rng.shuffle(answers)
        make_pairs(Listed(states), answers, Rules(vote), to=tmp_path / str(number))
        written.append((tmp_path / str(number)).read_bytes())
    assert written[0] and set(written) == {written[0]}


@pytest.mark.parametrize(
    ("states", "answers", "told"),
    [
        (0, 0, "the store holds no state: fill it with `composer-prime replay ingest`"),
        (4, 0, "there are no answers to vote with (0 are empty): ask teachers first"),
        (2, 2, "none of the 2 answers is for a state of this store: give the folder that"),
    ],
)
def test_what_nothing_can_come_of_is_refused_and_writes_nothing(
    tmp_path: Path, states: int, answers: int, told: str
) -> None:
    found, said = session()
    with pytest.raises(BadInput) as refused:
        make_pairs(Listed(found[:states]), said[-2:][:answers], Rules(), to=tmp_path / "pairs.jsonl")
    assert told in str(refused.value) and list(tmp_path.iterdir()) == []


def test_two_answers_of_one_teacher_at_a_state_are_refused_and_the_same_one_twice_is_one() -> None:
    one = state("what now?", says("x"))
    twice = [answer(one, "a", "left"), answer(one, "a", "left")]
    assert make_pairs(Listed([one]), twice, Rules()).teachers["a"].num_votes == 1
    with pytest.raises(BadInput, match=f"teacher a has two answers at state {one.id}"):
        make_pairs(Listed([one]), [*twice, answer(one, "a", "right")], Rules())
