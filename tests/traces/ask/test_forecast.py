"""What a dry run says: calls, dollars, minutes, and that nothing is sent or written."""

import pytest

from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ask.plan import make_plan
from composer_prime.traces.ask.report import ASSUMED_LATENCY_S, forecast
from tests.traces.ask.text_teacher import FakeTextTeacher, Listed, trace

STATES = [trace(number) for number in range(6)]


def test_a_forecast_sends_nothing_and_bounds_what_the_run_then_costs(serve, asking, tmp_path):
    fakes = [FakeTextTeacher(), FakeTextTeacher()]
    teachers = [serve(fakes[0], name="cheap"), serve(fakes[1], name="dear", tier=1, max_in_flight=1)]
    found = forecast(make_plan(Listed([*STATES, *STATES])), teachers, tmp_path / "answers")
    assert not (tmp_path / "answers").exists() and not fakes[0].bodies
    assert found.heading == "6 decision points"
    assert (found.least.num_calls, found.most.num_calls, found.spent_usd) == (12, 12, 0)
    assert found.most.minutes == pytest.approx(6 * ASSUMED_LATENCY_S / 8 / 60 + 6 * ASSUMED_LATENCY_S / 60)
    asking(STATES, teachers)
    served = sum(fake.served_usd for fake in fakes)
    assert served == pytest.approx(found.least.predicted_usd, rel=0.2) and served <= found.least.worst_usd


def test_a_forecast_over_answers_counts_what_is_left_by_what_calls_cost_so_far(serve, asking, tmp_path):
    teacher = serve(FakeTextTeacher())
    asking(STATES[:4], [teacher])
    records = AnswerFolder(tmp_path / "answers").ledger()
    before = sorted((path.name, path.read_bytes()) for path in (tmp_path / "answers").iterdir())
    found = forecast(make_plan(Listed(STATES)), [teacher], tmp_path / "answers")
    mean = sum(record.usd_settled or 0 for record in records) / 4
    assert (found.num_cached, found.least.num_calls) == (4, 2)
    assert found.least.predicted_usd == pytest.approx(2 * mean, abs=1e-8)
    assert found.spent_usd == pytest.approx(4 * mean)
    assert sorted((path.name, path.read_bytes()) for path in (tmp_path / "answers").iterdir()) == before
