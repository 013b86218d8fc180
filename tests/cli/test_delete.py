"""`composer-prime delete`, and what becomes of a name whose first try made nothing."""

import io
import json
from pathlib import Path

import pytest

from composer_prime.errors import FingerprintMismatch
from composer_prime.store import keys, open_store
from tests.sync.harness import HandSite, ThreadSite, make_terms, run_sites

RECIPE = """
max_steps = 8
[run]
name = "first"
[outer]
store = "{store}"
inner_steps = 4
fragments = 2
[[orchestrator.train.source]]
name = "letters"
[orchestrator.train.source.env.taskset]
id = "letters"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(store=tmp_path / "bucket"))
    return str(path)


def test_delete_says_what_goes_and_asks(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, store = str(tmp_path / "run"), open_store(str(tmp_path / "run"))
    run_sites(ThreadSite(store, make_terms(), "a"))
    before = store.list("")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    asked = cli("delete", run)
    assert asked.code != 0 and store.list("") == before
    for part in (f"{len(before)} objects", "run run in", "closed: 3 of 3 rounds", "stored masters "):
        assert part in asked.out, asked.out
    done = cli("delete", run, "--yes")
    assert done.code == 0 and store.list("") == [], done.err
    again = cli("delete", run, "--yes")
    assert again.code == 2 and "holds no run" in again.err


def test_status_after_create_shows_the_run_with_no_round_yet(cli, recipe: str, tmp_path: Path):
    assert cli("create", recipe, "--weights", "first-site").code == 0
    shown = cli("status", str(tmp_path / "bucket" / "first"))
    assert shown.code == 0 and "0 of 2 rounds" in shown.out and "run first" in shown.out, shown.err
    found = json.loads(cli("status", str(tmp_path / "bucket" / "first"), "--json").out)
    assert (found["run"], found["rounds_done"], found["rounds"], found["sites"]) == ("first", 0, 2, [])


def test_a_corrected_recipe_takes_the_name_of_a_run_that_made_no_round(cli, recipe: str, tmp_path: Path):
    uri = str(tmp_path / "bucket" / "first")
    assert cli("create", recipe, "--weights", "first-site").code == 0
    refused = cli("create", recipe, "--weights", "first-site", "--outer.lr", "0.5")
    assert refused.code == 2 and f"composer-prime delete file://{uri}" in refused.err
    assert cli("delete", uri, "--yes").code == 0
    assert cli("create", recipe, "--weights", "first-site", "--outer.lr", "0.5").code == 0
    assert b'"lr":0.5' in open_store(uri).get(keys.founding())


def test_a_difference_names_what_to_type():
    store = open_store("memory://difference")
    HandSite(store, make_terms(), "a", [0.0])
    with pytest.raises(FingerprintMismatch, match=f"composer-prime delete {store.uri}"):
        HandSite(store, make_terms(lr=0.5), "b", [0.0])
