"""Broken sessions: 300 of those that `python -m tests.traces.ingest.fuzz` has 10,000 of."""

import pytest

from tests.traces.ingest.fuzz import run_case


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_broken_sessions_raise_nothing_lose_nothing_silently_and_come_back(first: int) -> None:
    outcomes = {seed: run_case(seed) for seed in range(first, first + 50)}
    assert sum(outcome.endswith(": read") for outcome in outcomes.values()) > 20, outcomes
