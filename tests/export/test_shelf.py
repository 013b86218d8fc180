"""Whole folders in the bucket: what is there loads as it is, the newest two stay, and a half one isn't counted."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from composer_prime.export.model import made_whole
from composer_prime.export.reading import MasterReader
from composer_prime.export.shelf import Shelf
from composer_prime.export.snapshot import open_model
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from tests.cli.command_line import call
from tests.export.runs import make_run
from tests.export.test_export import expected
from tests.export.test_following import Growing

DTYPE = "bfloat16"


@pytest.fixture(scope="module")
def run(base: Path) -> Store:
    return make_run("memory://shelved", base, rounds=3)


def shelf(store: Store, base: Path) -> Shelf:
    reader = MasterReader(store)
    return Shelf(reader, open_model(reader, base, str(base), DTYPE), str(base))


def copied(store: Store, prefix: str, folder: Path) -> Path:
    folder.mkdir()
    for key in store.list(prefix):
        (folder / key.removeprefix(prefix)).write_bytes(store.get(key))
    return folder


def test_a_folder_copied_out_of_the_bucket_loads_and_holds_the_masters(run, base, tmp_path):
    growing = Growing(run, "shelf-growing")
    growing.show(1)
    keeping = shelf(growing.store, base)
    kept = []
    for version in (1, 2, 3):
        growing.show(version)
        prefix = keeping.tick()
        assert prefix is not None and keeping.tick() is None
        kept.append(prefix)
        policy = AutoModelForCausalLM.from_pretrained(
            copied(growing.store, prefix, tmp_path / str(version)), dtype="auto"
        )
        wanted = expected(run, version, torch.bfloat16)
        assert all(torch.equal(policy.get_parameter(name), value) for name, value in wanted.items())
    listed = growing.store.list(keys.snapshots_prefix(DTYPE))
    assert {key.rpartition("/")[0] + "/" for key in listed} == set(kept[1:])
    assert shelf(growing.store, base).tick() is None


def test_a_folder_without_its_record_is_put_again_at_the_same_place(run, base):
    growing = Growing(run, "shelf-half")
    growing.show(1)
    prefix = shelf(growing.store, base).tick()
    assert prefix is not None
    whole = {key: growing.store.get(key) for key in growing.store.list(prefix)}
    growing.store.delete(f"{prefix}composer-prime.json")
    growing.store.delete(f"{prefix}config.json")
    assert shelf(growing.store, base).tick() == prefix
    assert {key: growing.store.get(key) for key in growing.store.list(prefix)} == whole


def test_a_folder_whose_making_fails_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), made_whole(tmp_path / "out") as making:
        (making / "config.json").write_text("{}")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_command_puts_folders_there_too(run, base, tmp_path, capsys, monkeypatch):
    growing = Growing(run, "unused")
    growing.store = open_store(str(tmp_path / "run"))
    growing.show(2)
    answer = call(capsys, monkeypatch, "publish", str(tmp_path / "run"), "--model", str(base), "--once")
    assert (answer.code, answer.err) == (0, "")
    *steps, line = answer.out.splitlines()
    assert len(steps) == 2 and line.startswith(f"whole folder at {growing.store.uri}/snapshots/{DTYPE}/00000002-")
    folder = tmp_path / "run" / "snapshots" / DTYPE
    (made,) = folder.iterdir()
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {file.name for file in made.iterdir()}
