"""The student decides whether teachers are asked: by its entropy, and whether it does what the author did."""

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import BadInput, TeacherError
from composer_prime.traces.ask.asking import Gate
from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ask.gate import TRIES, mean_entropy
from tests.traces.ask.conftest import Ask, Serve
from tests.traces.ask.text_teacher import FakeTextTeacher, Fault, call, number_of, told_logprobs, trace

STATES = [trace(number) for number in range(4)]
SURE = [math.log(0.99), math.log(0.01)]
UNSURE = [math.log(0.5), math.log(0.25), math.log(0.25)]


def as_author(body: Mapping[str, Any]) -> dict[str, Any]:
    return call(f"{number_of(body)}.py")


def student(says=as_author, spread=SURE, fault: Fault = "ok") -> FakeTextTeacher:
    return FakeTextTeacher(says=says, logprobs=lambda body: told_logprobs(spread), fault=lambda number: fault)


def num_asked(serve: Serve, asking: Ask, fake: FakeTextTeacher, min_entropy: float = 0.5) -> int:
    """Questions that a teacher gets behind this student."""
    teacher = FakeTextTeacher()
    gate = Gate(serve(fake).base_url, min_entropy)
    report = asking(STATES, [serve(teacher)], gate=gate)
    assert report.num_skipped + len(teacher.bodies) == len(STATES)
    return len(teacher.bodies)


def test_nobody_is_asked_where_the_student_is_sure_and_does_what_the_author_did(serve: Serve, asking: Ask) -> None:
    fake = student()
    assert num_asked(serve, asking, fake) == 0
    body = fake.bodies[0]
    assert (body["model"], body["temperature"], body["logprobs"], body["top_logprobs"]) == ("student", 0, True, 20)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_teachers_are_asked_where_the_student_is_unsure(serve: Serve, asking: Ask) -> None:
    assert num_asked(serve, asking, student(spread=UNSURE)) == 4
    assert num_asked(serve, asking, student(spread=UNSURE), min_entropy=1.1) == 0


def test_teachers_are_asked_where_a_sure_student_would_do_something_else(serve: Serve, asking: Ask) -> None:
    other = student(says=lambda body: call("x") if number_of(body) % 2 else as_author(body))
    assert num_asked(serve, asking, other) == 2


def test_a_call_that_the_students_text_spells_is_a_call(serve: Serve, asking: Ask) -> None:
    def spelled(body: Mapping[str, Any]) -> dict[str, Any]:
        text = f'<tool_call>\n{{"name": "read_file", "arguments": {{"path": "{number_of(body)}.py"}}}}\n</tool_call>'
        return {"role": "assistant", "content": "<think>\nHm.\n</think>\n" + text}

    assert num_asked(serve, asking, student(says=spelled)) == 0


def test_a_question_that_the_student_refuses_goes_to_the_teachers(serve: Serve, asking: Ask) -> None:
    assert num_asked(serve, asking, student(fault="refused")) == 4


def test_without_a_student_that_answers_nothing_is_spent(serve: Serve, asking: Ask) -> None:
    teacher = FakeTextTeacher()
    pool, fake = [serve(teacher)], student(fault="broken")
    with pytest.raises(TeacherError, match="the student can't be asked: 500"):
        asking(STATES, pool, gate=Gate(serve(fake).base_url, 0.5))
    with pytest.raises(BadInput, match="lists no model"):
        asking(STATES, pool, gate=Gate("http://127.0.0.1:9", 0.5))
    with pytest.raises(BadInput, match="must be http://host:port"):
        asking(STATES, pool, gate=Gate("localhost", 0.5))
    assert not teacher.bodies


def test_what_is_on_its_way_when_the_student_fails_comes_home(serve: Serve, asking: Ask, tmp_path: Path) -> None:
    has_failed = threading.Event()
    fake = FakeTextTeacher(
        says=as_author,
        logprobs=lambda body: told_logprobs(UNSURE),
        fault=lambda number: "broken" if number else "ok",
        hook=lambda number, when: has_failed.set() if (number, when) == (TRIES, "after") else None,
    )
    teacher = FakeTextTeacher(hook=lambda number, when: has_failed.wait(60))
    with pytest.raises(TeacherError):
        asking(STATES, [serve(teacher, max_in_flight=2)], gate=Gate(serve(fake).base_url, 0.5))
    assert [record.outcome for record in AnswerFolder(tmp_path / "answers").ledger()] == ["answered"]


def test_a_student_that_gives_no_logprobs_is_not_taken_for_a_sure_one(serve: Serve, asking: Ask) -> None:
    teacher = FakeTextTeacher()
    with pytest.raises(BadInput, match="gives no top_logprobs"):
        asking(STATES, [serve(teacher)], gate=Gate(serve(FakeTextTeacher(says=as_author)).base_url, 0.5))
    assert not teacher.bodies


def test_entropy_is_that_of_the_listed_tokens_with_all_others_as_one() -> None:
    listed = told_logprobs(UNSURE)["content"]
    assert mean_entropy(listed) == pytest.approx(1.5 * math.log(2))
    tail = told_logprobs([math.log(0.5)])["content"]
    assert mean_entropy(tail) == pytest.approx(math.log(2))
    assert mean_entropy([*listed, *tail]) == pytest.approx(1.25 * math.log(2))
