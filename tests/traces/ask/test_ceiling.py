"""A ceiling of dollars against the server's own count of what it served: faults, doubled prices, restarts."""

import asyncio
import random
from pathlib import Path
from typing import Any, get_args

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.ask.asking import ask
from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ask.ledger import DOUBT, Record
from composer_prime.traces.ask.plan import make_plan
from composer_prime.traces.ask.prices import usd, worst_case
from composer_prime.traces.ask.questions import Wording
from tests.traces.ask.conftest import Ask, Serve
from tests.traces.ask.text_teacher import FakeTextTeacher, Fault, Listed, trace

STATES = [trace(number) for number in range(12)]


def committed(records: tuple[Record, ...]) -> float:
    return sum(record.usd_reserved if record.usd_settled is None else record.usd_settled for record in records)


def one_call(teacher: Any) -> float:
    """The most that a call can cost."""
    return usd(worst_case(teacher, len(Wording().request(STATES[0], teacher))))


@pytest.mark.parametrize("seed", range(8))
def test_servers_never_serve_more_dollars_than_the_ceiling(
    serve: Serve, asking: Ask, tmp_path: Path, seed: int
) -> None:
    """Answers take all that they may, a server doubles its prices, answers are lost, and runs are started again."""
    draw = random.Random(seed)
    faults: list[Fault] = [draw.choice(["ok", "ok", *get_args(Fault)]) for _ in range(1000)]
    fakes = [
        FakeTextTeacher(
            fault=lambda number, start=300 * factor: faults[start + number],
            factor=max(factor, 1),
            states_cost=factor > 1,
            is_greedy=draw.random() < 0.7,
        )
        for factor in (1, 2, 0)
    ]
    teachers = [serve(fake, name=f"t{i}", max_in_flight=draw.randrange(1, 5)) for i, fake in enumerate(fakes)]
    ceiling = DOUBT * one_call(teachers[0]) * draw.uniform(4, 12)
    for _ in range(3):
        try:
            asking(STATES, teachers, ceiling)
        except BadInput as error:
            assert "is below one call" in str(error)
        assert sum(fake.served_usd for fake in fakes) <= ceiling, f"seed {seed}"
        assert committed(AnswerFolder(tmp_path / "answers").ledger()) <= ceiling, f"seed {seed}"
    assert sum(fake.served_usd for fake in fakes) > 0


def test_no_moment_of_a_run_has_more_settled_and_reserved_than_the_ceiling(serve: Serve, tmp_path: Path) -> None:
    """Looked at from outside, on the disk, whenever a request arrives."""
    folder, seen = tmp_path / "answers", []
    fake = FakeTextTeacher(
        is_greedy=True, hook=lambda number, when: seen.append(committed(AnswerFolder(folder).ledger()))
    )
    teacher = serve(fake)
    ceiling = DOUBT * one_call(teacher) * 3.5
    store = Listed(STATES)
    asyncio.run(ask(store, make_plan(store), [teacher], folder, ceiling))
    assert len(seen) == 2 * len(fake.bodies) > 4 and max(seen) <= ceiling


def test_a_request_that_arrives_was_reserved_on_the_disk_before(serve: Serve, tmp_path: Path) -> None:
    folder, open_calls = tmp_path / "answers", []

    def look(number: int, when: str) -> None:
        open_calls.append(sum(record.outcome == "reserved" for record in AnswerFolder(folder).ledger()))

    teacher = serve(FakeTextTeacher(hook=look), max_in_flight=1)
    store = Listed(STATES[:3])
    asyncio.run(ask(store, make_plan(store), [teacher], folder, 1.0))
    assert open_calls == [1] * 6


def test_a_ceiling_below_one_call_is_refused_with_the_least_that_would_do(serve: Serve, asking: Ask) -> None:
    fake = FakeTextTeacher()
    teacher = serve(fake)
    with pytest.raises(BadInput, match=r"--ceiling-usd \(1e-05\) is below one call.*give at least ([\d.]+)") as found:
        asking(STATES[:1], [teacher], 0.00001)
    assert not fake.bodies
    least = float(str(found.value).rpartition(" ")[2])
    assert asking(STATES[:1], [teacher], least).is_complete and len(fake.bodies) == 1


def test_what_does_not_fit_is_said_and_asked_under_a_higher_ceiling(serve: Serve, asking: Ask) -> None:
    fake = FakeTextTeacher(is_greedy=True)
    teacher = serve(fake)
    report = asking(STATES, [teacher], DOUBT * one_call(teacher) * 2)
    assert 0 < len(fake.bodies) < 12 and report.teachers[0].num_waiting == 12 - len(fake.bodies)
    assert not report.is_complete and "raise --ceiling-usd" in "\n".join(report.lines())
    assert asking(STATES, [teacher]).is_complete and len(fake.bodies) == 12


def test_cached_answers_need_no_ceiling(serve: Serve, asking: Ask) -> None:
    teacher = serve(FakeTextTeacher())
    asking(STATES, [teacher])
    assert asking(STATES, [teacher], 0.00001).is_complete


@pytest.mark.parametrize("ceiling", [0.0, -1.0, float("nan"), float("inf")])
def test_a_ceiling_that_is_no_amount_is_refused(serve: Serve, asking: Ask, ceiling: float) -> None:
    with pytest.raises(BadInput, match="must be dollars above 0"):
        asking(STATES, [serve(FakeTextTeacher())], ceiling)
