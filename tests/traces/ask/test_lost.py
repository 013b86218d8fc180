"""Calls whose answer never came: told by the provider's usage record, else released after a stated time."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.traces.ask import teacher as teacher_module
from composer_prime.traces.ask.folder import AnswerFolder
from tests.traces.ask.text_teacher import FakeTextTeacher, trace


@pytest.fixture
def folder(tmp_path: Path) -> AnswerFolder:
    return AnswerFolder(tmp_path / "answers")


Later: TypeAlias = Callable[[float], None]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Let so many seconds pass for the teachers."""

    def jump(seconds: float) -> None:
        moved = SimpleNamespace(time=lambda: time.time() + seconds, monotonic=time.monotonic)
        monkeypatch.setattr(teacher_module, "time", moved)

    return jump


def with_usage(teacher: TextTeacher, **more: object) -> TextTeacher:
    return teacher.model_copy(update={"usage_url": f"{teacher.base_url}/usage", **more})


def test_the_usage_record_settles_a_lost_call_to_the_cent(serve, asking, folder):
    fake = FakeTextTeacher(fault=lambda number: "lost" if number < 2 else "ok", usage_tells=True)
    report = asking([trace(1)], [with_usage(serve(fake))])
    records = folder.ledger()
    assert [record.outcome for record in records] == ["lost", "lost", "answered"] and report.num_lost == 0
    assert [fake.costs[record.call] for record in records] == [
        round((record.usd_settled or 0) * 10**9) for record in records
    ]
    assert report.usd_run == pytest.approx(fake.served_usd, abs=1e-12)


def test_a_lost_call_stays_reserved_while_nobody_tells_and_is_settled_once_somebody_does(serve, asking, folder):
    fake = FakeTextTeacher(fault=lambda number: "lost" if number < 2 else "ok")
    teacher = with_usage(serve(fake))
    report = asking([trace(1)], [teacher])
    assert report.num_lost == 2 and report.usd_lost + report.usd_run >= fake.served_usd
    fake.usage_tells = True
    later = asking([trace(1)], [teacher])
    assert later.num_lost == later.num_calls == 0
    with folder.copied() as copy:
        assert (copy.ledger.settled, copy.ledger.unsettled) == (fake.served_nano, 0)


def test_a_call_that_the_provider_does_not_know_costs_nothing_once_it_can_no_longer_be_on_its_way(
    serve, asking, folder, later
):
    fake = FakeTextTeacher(fault=lambda number: "dead" if number < 1 else "ok", usage_tells=True)
    teacher = with_usage(serve(fake))
    assert asking([trace(1)], [teacher]).num_lost == 1
    later(teacher.timeout_s)
    assert asking([trace(1)], [teacher]).num_lost == 0
    lost, answered = folder.ledger()
    assert (lost.outcome, lost.usd_settled) == ("lost", 0) and answered.usd_settled == pytest.approx(fake.served_usd)


def test_a_lost_call_is_released_after_the_stated_time_and_the_ledger_says_so(serve, asking, folder, later):
    fake = FakeTextTeacher(fault=lambda number: "lost" if not number else "ok")
    teacher = serve(fake, release_lost_after_s=3600.0)
    assert asking([trace(1)], [teacher]).num_lost == asking([trace(1)], [teacher]).num_lost == 1
    later(3600.0)
    assert asking([trace(1)], [teacher]).num_lost == 0
    assert [record.outcome for record in folder.ledger()] == ["released", "answered"]
