"""What --clean destroys, and when: nothing before the last check, and never a run that sites live in."""

import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from composer_prime.config import RunPaths
from composer_prime.errors import BadInput, FingerprintMismatch
from composer_prime.sites.embedded.local_run import run_local, run_site
from composer_prime.store import keys, open_store
from composer_prime.sync.terms import terms_of
from tests.patience import PATIENCE_S
from tests.servers.listening import listening
from tests.sites.fake_site import small_recipe
from tests.sites.test_local_run import DONE, surroundings
from tests.sync.harness import HandSite, ThreadSite, make_terms, run_sites

OUTER = {"inner_steps": 4, "fragments": 2}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file's bytes, and every folder, by its path."""
    found = sorted(folder.rglob("*"))
    return {str(each.relative_to(folder)): each.read_bytes() if each.is_file() else None for each in found}


def objects(uri: str) -> dict[str, bytes]:
    with closing(open_store(uri)) as store:
        return {key: store.get(key) for key in store.list("")}


def train(uri: str, rounds: int = 3) -> None:
    """A run that has ended, in a bucket."""
    with closing(open_store(uri)) as store:
        run_sites(ThreadSite(store, make_terms(rounds=rounds), "a"))


@pytest.mark.parametrize("kind", [pytest.param("moto", marks=pytest.mark.s3), "file"])
def test_two_finished_runs_survive_a_refused_clean_bit_for_bit(
    kind: str, store_uri: Callable[[str], str], tmp_path: Path
) -> None:
    """The one in the folder and the one in the bucket. A folder would be cleaned, so there the model is what fails."""
    outer = {**OUTER, "store": store_uri(kind)}
    place = tmp_path / "out"
    assert run_local(small_recipe(place, outer=outer), False, surroundings(tmp_path, trainer=DONE)) == 0
    train(f"{outer['store']}/fake")
    local, bucket = tree(place), objects(f"{outer['store']}/fake")
    fails = replace(surroundings(tmp_path), model_command=lambda recipe: [sys.executable, "-c", "exit(2)"])
    with pytest.raises(BadInput, match="composer-prime delete" if kind == "moto" else "model: "):
        run_local(small_recipe(place, outer=outer, clean=True), False, fails)
    assert tree(place) == local and len(local) > 10
    assert objects(f"{outer['store']}/fake") == bucket


def test_a_port_in_use_is_told_before_a_run_is_deleted(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path / "out")
    assert run_local(recipe, False, surroundings(tmp_path, trainer=DONE)) == 0
    local = tree(tmp_path / "out")
    with listening(lambda client: client.close()) as port, pytest.raises(BadInput, match=f"{port}"):
        taken = small_recipe(tmp_path / "out", clean=True, inference={"server": {"port": port}})
        run_local(taken, False, surroundings(tmp_path))
    assert tree(tmp_path / "out") == local
    assert run_local(small_recipe(tmp_path / "out", clean=True), False, surroundings(tmp_path, trainer=DONE)) == 0
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["fake"]


def test_an_interrupt_before_the_start_leaves_the_run_that_clean_would_delete(tmp_path: Path) -> None:
    assert run_local(small_recipe(tmp_path / "out"), False, surroundings(tmp_path, trainer=DONE)) == 0
    local = tree(tmp_path / "out")
    interrupts = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    around = replace(surroundings(tmp_path), model_command=lambda recipe: [sys.executable, "-c", interrupts])
    assert run_local(small_recipe(tmp_path / "out", clean=True), False, around) == 130
    assert tree(tmp_path / "out") == local


def test_a_run_that_others_train_in_survives_anothers_clean(tmp_path: Path) -> None:
    """Elsewhere, from the same recipe, so that names and settings are the same; only the folder of the bucket is."""
    bucket = tmp_path / "bucket" / "fake"
    store, joined, tried = open_store(str(bucket)), threading.Event(), threading.Event()
    site = ThreadSite(store, make_terms(liveness_s=2.0), "a")
    site.after_join = lambda: joined.set() or tried.wait(PATIENCE_S)
    training = threading.Thread(target=run_sites, args=(site,))
    training.start()
    recipe = small_recipe(tmp_path / "out", outer={**OUTER, "store": str(bucket.parent)}, clean=True)
    try:
        assert joined.wait(PATIENCE_S)
        with pytest.raises(BadInput, match=r"site a still runs"):
            run_local(recipe, False, surroundings(tmp_path, trainer=DONE))
    finally:
        tried.set()
        training.join()
    assert site.error is None and site.outer.finished
    assert run_local(recipe, False, surroundings(tmp_path, trainer=DONE)) == 0
    assert not objects(str(bucket))


def test_a_site_that_died_holds_up_no_clean(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket" / "fake"
    HandSite(open_store(str(bucket)), make_terms(liveness_s=0.2), "a", [0.0])
    recipe = small_recipe(tmp_path / "out", outer={**OUTER, "store": str(bucket.parent)}, clean=True)
    assert run_local(recipe, False, surroundings(tmp_path, trainer=DONE)) == 0
    assert not objects(str(bucket))


def test_a_site_that_the_bucket_refuses_keeps_its_folder(tmp_path: Path) -> None:
    outer = {**OUTER, "store": str(tmp_path / "bucket")}
    recipe = small_recipe(tmp_path / "out", outer=outer)
    assert run_site(recipe, "a", False, surroundings(tmp_path, trainer=DONE)) == 0
    train(str(tmp_path / "bucket" / "fake"), rounds=5)
    kept = tree(RunPaths.of(recipe).site("a").root)
    with pytest.raises(FingerprintMismatch, match=r"outer\.codec: run 'fp32', recipe 'int8'"):
        run_site(small_recipe(tmp_path / "out", outer=outer, clean=True), "a", False, surroundings(tmp_path))
    assert tree(RunPaths.of(recipe).site("a").root) == kept


@pytest.mark.s3
def test_a_try_that_made_no_round_leaves_its_name_to_the_next(store_uri: Callable[[str], str], tmp_path: Path) -> None:
    """On a bucket, where --clean deletes no run that made a round."""
    outer = {**OUTER, "store": store_uri("moto")}
    uri = f"{outer['store']}/fake"
    recipe = small_recipe(tmp_path / "out", outer=outer, clean=True)
    with closing(open_store(uri)) as store:
        HandSite(store, terms_of(recipe).model_copy(update={"lr": 9.0, "liveness_s": 0.2}), "a", [0.0])
    with pytest.raises(BadInput, match="made no round"):
        run_local(small_recipe(tmp_path / "out", outer=outer), False, surroundings(tmp_path))
    assert run_local(recipe, False, surroundings(tmp_path, trainer=DONE)) == 0
    assert keys.manifest() not in objects(uri)
