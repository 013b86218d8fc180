"""Questions through a batch API: the same answers for less, found again after a kill, never sent twice."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.traces.ask import batch
from composer_prime.traces.ask.asking import ask
from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ask.plan import make_plan
from tests.traces.ask.batch_server import FakeBatches, serving_batches
from tests.traces.ask.text_teacher import FakeTextTeacher, Listed, trace

STATES = [trace(number) for number in range(6)]
Begin = Callable[..., tuple[FakeBatches, TextTeacher]]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """`begin(**settings of the fake)` serves one; it and the table that names it."""
    monkeypatch.setattr(batch, "GATHER_S", 0.05)
    monkeypatch.setattr(batch, "POLL_S", 0.01)
    with ExitStack() as stack:

        def run(**settings: Any) -> tuple[FakeBatches, TextTeacher]:
            teacher = FakeTextTeacher()
            fake = FakeBatches(teacher, teacher.config("http://127.0.0.1:1", batch=True), **settings)
            return fake, teacher.config(stack.enter_context(serving_batches(fake)), batch=True, max_in_flight=100)

        yield run


def answers(folder: Path) -> list[Any]:
    return [(one.state, one.action) for one in AnswerFolder(folder).answers()]


async def killed_while_out(fake: FakeBatches, teacher: TextTeacher, folder: Path) -> None:
    """Ask, and stop without a word while the batch is out."""
    store = Listed(STATES)
    run = asyncio.create_task(ask(store, make_plan(store), [teacher], folder, 1.0))
    while not fake.polled.is_set():
        await asyncio.sleep(0.005)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


def test_a_batch_gives_the_same_answers_for_half_the_price(begin, serve, asking, tmp_path):
    fake, teacher = begin()
    report = asking(STATES, [teacher])
    assert len(fake.batches) == 1 and report.is_complete and report.usd == pytest.approx(fake.teacher.served_usd)
    live = FakeTextTeacher()
    store = Listed(STATES)
    one_by_one = asyncio.run(ask(store, make_plan(store), [serve(live)], tmp_path / "live", 1.0))
    assert answers(tmp_path / "answers") == answers(tmp_path / "live") and len(answers(tmp_path / "live")) == 6
    assert report.usd == pytest.approx(one_by_one.usd / 2)


def test_a_batch_that_is_out_when_the_process_ends_is_resumed_by_its_id(begin, asking, tmp_path):
    fake, teacher = begin(is_done=False)
    asyncio.run(killed_while_out(fake, teacher, tmp_path / "answers"))
    assert [record.outcome for record in AnswerFolder(tmp_path / "answers").ledger()] == ["reserved"] * 6
    fake.is_done = True
    report = asking(STATES, [teacher])
    assert len(fake.batches) == 1 and report.is_complete and report.num_calls == report.num_lost == 0
    assert report.usd == pytest.approx(fake.teacher.served_usd) and len(answers(tmp_path / "answers")) == 6


def test_a_resumed_batch_answers_also_those_that_come_for_their_answers_after_it_was_dealt(begin, asking, tmp_path):
    fake, teacher = begin(is_done=False)
    asyncio.run(killed_while_out(fake, teacher, tmp_path / "answers"))
    fake.is_done = True
    report = asking(STATES, [teacher.model_copy(update={"max_in_flight": 1})])
    assert len(fake.batches) == 1 and report.is_complete and report.num_calls == report.num_lost == 0
    assert len(answers(tmp_path / "answers")) == 6


def test_a_batch_whose_id_never_came_is_found_by_our_token(begin, asking, tmp_path):
    fake, teacher = begin(forgets=True)
    report = asking(STATES, [teacher])
    assert len(fake.batches) == 1 and report.is_complete and report.usd == pytest.approx(fake.teacher.served_usd)


def test_what_an_expired_batch_left_out_costs_nothing_and_is_asked_in_the_next(begin, asking):
    fake, teacher = begin(ends="expired")
    report = asking(STATES[:2], [teacher])
    assert report.teachers[0].num_answered == 1 and report.teachers[0].num_failed == 1 and report.num_lost == 0
    assert "the batch expired without it" in (report.teachers[0].last_failure or "")
    fake.ends = "completed"
    assert asking(STATES[:2], [teacher]).is_complete and report.usd_lost == 0
