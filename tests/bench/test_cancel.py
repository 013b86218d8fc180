"""The bench of `cancel`: it ends real jobs, and names the one that can't be ended."""

import pytest

from tests.bench import cancel


def test_all_ends_but_the_failing_jobs_are_confirmed(capsys: pytest.CaptureFixture[str]) -> None:
    cancel.main(["local", "--jobs", "3"])
    said = capsys.readouterr().out
    assert "local    3 jobs up" in said and "; 2 ends asked for and confirmed within " in said
    assert "not confirmed: [\"KeyError: 'status'\"]" in said
