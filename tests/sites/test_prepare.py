"""What stands before a site's processes start."""

import sys
from pathlib import Path

import pytest

from composer_prime.config.paths import RunPaths
from composer_prime.sites.embedded.prepare import ModelResolution, check_bucket
from composer_prime.store.file import FileStore
from tests.config.recipes import recipe
from tests.patience import PATIENCE_S


def test_two_sites_of_one_folder_that_start_at_once_each_get_their_own_answer(tmp_path: Path) -> None:
    first = ModelResolution([sys.executable, "-c", "print('/model')"], RunPaths(tmp_path))
    assert first._child.wait(PATIENCE_S) == 0
    second = ModelResolution([sys.executable, "-c", "print('loading'); print('/other')"], RunPaths(tmp_path))
    try:
        assert first.wait(lambda: False) == Path("/model")
        assert second.wait(lambda: False) == Path("/other")
    finally:
        first.stop()
        second.stop()
    assert list((tmp_path / "logs").glob("*.out")) == []


def test_a_site_tries_the_bucket_below_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created, create = [], FileStore.create

    def noted(store: FileStore, key: str, data: bytes) -> bool:
        created.append(key.rpartition("/")[0])
        return create(store, key, data)

    monkeypatch.setattr(FileStore, "create", noted)
    run = recipe(outer={"inner_steps": 4, "fragments": 2, "store": str(tmp_path)})
    check_bucket(run, "alice", new_run=False)
    assert created == ["probe/alice"] * 2
