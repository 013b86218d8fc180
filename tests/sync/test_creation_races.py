"""Whoever creates a run races its store first, and writes nothing into one that lets two writers win."""

import secrets
from pathlib import Path

import pytest

from composer_prime.config import SiteSettings, settle_site
from composer_prime.errors import StoreUnusable
from composer_prime.sync import site_clock
from composer_prime.sync.site_clock import OuterLoop
from tests.config.recipes import recipe
from tests.store.meeting import Meeting
from tests.sync.harness import make_net


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    """What sites open: a store that only writers who race find out."""
    store = Meeting(secrets.token_hex(8), num_meeting=2)
    monkeypatch.setattr(site_clock, "open_store", lambda uri, key_file: store)
    return store


def settle(folder: Path, **outer: object) -> SiteSettings:
    asked = recipe(output_dir=str(folder), outer={"inner_steps": 4, "fragments": 2, **outer})
    return settle_site(asked, "a", inference_port=8000, model_dir=folder / "model", resume=False)


def test_a_run_is_not_created_in_a_store_that_lets_two_of_racing_writers_win(bucket: Meeting, tmp_path: Path) -> None:
    outer = OuterLoop.from_settings(settle(tmp_path))
    with pytest.raises(StoreUnusable, match=r"of 20 races of 16 writers, .*had [23] winners.*: use a store that"):
        outer.join(make_net().named_parameters())
    assert bucket.list("") == []
