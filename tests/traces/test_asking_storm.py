"""Asking that is killed three times, at the storm's small size."""

from pathlib import Path

import pytest

from tests.traces import asking_storm

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tells_usage", [True, False])
def test_kills_ask_nothing_twice_that_was_stored_and_the_ledger_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells_usage: bool
) -> None:
    monkeypatch.setattr(asking_storm, "TIMEOUT_S", 5.0)
    found = asking_storm.storm(tmp_path, 300, 32, 3, tells_usage)
    assert (found.num_answered, found.num_twice, found.num_unnamed) == (600, 0, 0), found
    assert found.num_again <= 3 * 32, found
    assert found.ledger == found.served if tells_usage else found.ledger >= found.served, found
