"""A thousand hostile invitations do nothing; without the list of what is allowed the same cases show what they do."""

import os

import pytest

from composer_prime.volunteers import consent, shared_recipe
from tests.volunteers.fuzz_invitations import run


def test_a_thousand_hostile_invitations_run_open_and_change_nothing() -> None:
    before = dict(os.environ)
    count = run(0, 1000)
    assert count.violations == [], "python -m tests.volunteers.fuzz_invitations --first N --cases 1 replays case N"
    assert count.accepted > 20 and count.refused > 500 and dict(os.environ) == before


def test_without_the_list_of_what_is_allowed_the_watch_would_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_recipe, "refusals", lambda data: iter(()))
    assert sum(": let in " in said for said in run(0, 600).violations) > 5


def test_without_the_volunteer_s_word_the_watch_would_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "_missing", lambda asked, allowed: iter(()))
    assert "let in Asked(environments=('reverse-letters',)" in "\n".join(run(0, 600).violations)
