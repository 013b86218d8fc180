"""`verify` and `status`: what they print, and the code they end with."""

import json
from pathlib import Path

import pytest

from composer_prime.store import keys, open_store
from tests.architecture import modules_loaded
from tests.sync.harness import ThreadSite, make_terms, run_sites


@pytest.fixture
def run(tmp_path: Path) -> str:
    """The folder of a run that has ended."""
    store = open_store(str(tmp_path / "run"))
    run_sites(*(ThreadSite(store, make_terms(quorum=2), name, data_seed=place) for place, name in enumerate("ab")))
    return str(tmp_path / "run")


def test_verify_prints_a_line_a_fragment_and_ok(cli, run: str):
    answer = cli("verify", run)
    first, second, last = answer.out.splitlines()
    assert answer.code == 0 and answer.err == ""
    assert first.startswith("fragment 0: version 0 to 4, 4 rounds") and second.startswith("fragment 1: version 0 to 4")
    assert last.startswith("ok: run run, closed")


def test_verify_names_the_first_fault_and_ends_with_1(cli, run: str):
    store = open_store(run)
    store.delete(keys.commit(1, 2))
    answer = cli("verify", run)
    assert answer.code == 1 and "ok" not in answer.out and answer.out.startswith("fragment 0: ")
    assert f"composer-prime: {keys.commit(1, 2)} is gone" in answer.err
    assert "Traceback" not in answer.err


def test_status_draws_the_run_its_sites_and_its_rounds(cli, run: str):
    answer = cli("status", run)
    assert answer.code == 0
    for part in (
        "closed: 3 of 3 rounds",
        "codec fp32",
        "open to whoever can write",
        "│ a ",
        "│ b ",
        "--watch-s",
        "payloads ",
    ):
        assert part in answer.out, answer.out


def test_status_as_json_holds_everything(cli, run: str):
    found = json.loads(cli("status", run, "--json").out)
    assert (found["run"], found["closed"], found["rounds_done"], found["problems"]) == ("run", True, 3, [])
    assert [site["site"] for site in found["sites"]] == ["a", "b"] and len(found["by_fragment"]) == 2
    assert (found["live"], found["contributing"], found["quorum"]) == (0, 2, 2)


def test_status_watches_for_as_long_as_it_is_told(cli, run: str):
    found = json.loads(cli("status", run, "--json", "--watch-s", "0.01").out)
    assert found["watched_s"] == 0.01 and [site["beating"] for site in found["sites"]] == [None, None]


@pytest.mark.parametrize("command", ["verify", "status"])
def test_a_folder_without_a_run_is_answered_in_one_line(cli, command: str, tmp_path: Path):
    answer = cli(command, str(tmp_path))
    assert answer.code == 2 and answer.err.count("\n") == 1 and "holds no run" in answer.err
    assert cli(command, "ftp://nowhere").code == 2


@pytest.mark.parametrize("command", ["verify", "status"])
def test_a_run_of_another_protocol_version_is_refused_by_its_number(cli, command: str, tmp_path: Path):
    open_store(str(tmp_path)).create(keys.manifest(), b'{"protocol": 1}')
    answer = cli(command, str(tmp_path))
    assert answer.code == 1 and "speaks protocol 1, this composer-prime speaks" in answer.err


def test_status_needs_no_torch_and_loads_little(run: str):
    loaded, _ = modules_loaded("status", run)
    assert "torch" not in loaded and len(loaded) < 600


def test_the_codecs_can_be_measured(cli):
    answer = cli("bench", "codecs", "--params", "4096", "--repeats", "1")
    assert answer.code == 0 and "int8" in answer.out
