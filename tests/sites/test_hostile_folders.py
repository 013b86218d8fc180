"""A model folder that somebody made to do harm, or by mistake, is refused in one line wherever it is loaded."""

import builtins
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from composer_prime.errors import BadInput, ModelError
from composer_prime.export.model import HfModel
from composer_prime.sites.embedded.inference.serve import load_tokenizer
from composer_prime.sites.embedded.inference.vllm_folder import make_whole_folder
from composer_prime.sites.embedded.model import load_policy, named_shapes, resolve_model
from composer_prime.teachers.fingerprint import load_tokenizer as load_any_tokenizer
from tests.sites.tiny_folder import save_random_tiny

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_tiny(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def whole(folder: Path) -> None:
    target = folder.parent / "whole"
    target.mkdir(exist_ok=True)
    make_whole_folder(target, model_dir=folder, weight_dir=folder, tied={})


WEIGHTS: dict[str, Callable[[Path], Any]] = {
    "resolve": lambda folder: resolve_model(str(folder), 0, folder.parent / "cache"),
    "policy": load_policy,
    "export": lambda folder: HfModel(folder, torch.bfloat16, []),
    "vllm": whole,
}
"""Everything that opens a folder's weights."""
CONFIGS: dict[str, Callable[[Path], Any]] = {
    "policy": load_policy,
    "export": lambda folder: HfModel(folder, torch.bfloat16, []),
    "shapes": lambda folder: named_shapes(str(folder)),
}
TOKENIZERS: dict[str, Callable[[Path], Any]] = {"server": load_tokenizer, "replay": load_any_tokenizer}


def index_of(folder: Path, name: str, index: str = INDEX) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, name)}))


def set_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def names_a_file_outside(folder: Path) -> None:
    index_of(folder, "../outside.safetensors")
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")


def names_a_pickle(folder: Path) -> None:
    index_of(folder, "pytorch_model.bin")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def names_a_pickle_by_another_index(folder: Path) -> None:
    names_a_pickle(folder)
    (folder / INDEX).rename(folder / "other.safetensors.index.json")
    save_file({}, folder / "model.safetensors")
    set_config(folder, transformers_weights="other.safetensors.index.json")


def links_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "model.safetensors").symlink_to("../outside.safetensors")


def links_to_anothers_blob(folder: Path) -> None:
    links_outside(folder)
    (folder.parent / "blobs").mkdir()
    (folder.parent / "outside.safetensors").rename(folder.parent / "blobs" / "abc")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/abc")


def names_no_texts(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": 1, "b": "c", "d": [2]}}))


def is_no_index(folder: Path) -> None:
    (folder / INDEX).write_text("[" * 100_000)


def has_an_endless_index(folder: Path) -> None:
    (folder / INDEX).touch()
    os.truncate(folder / INDEX, 8 * 2**30)


def has_an_endless_config(folder: Path) -> None:
    os.truncate(folder / "config.json", 8 * 2**30)


BAD = (
    names_a_file_outside,
    names_a_pickle,
    names_a_pickle_by_another_index,
    links_outside,
    links_to_anothers_blob,
    names_no_texts,
    is_no_index,
    has_an_endless_index,
    has_an_endless_config,
)


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("way", WEIGHTS)
def test_weights_come_as_safetensors_of_the_folder_itself(
    folder: Path, way: str, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(folder)
    monkeypatch.setattr(torch, "load", lambda *args, **more: pytest.fail("torch.load was reached"))
    with pytest.raises(ModelError) as said:
        WEIGHTS[way](folder)
    assert "\n" not in str(said.value) and str(folder) in str(said.value)


def test_a_snapshot_of_the_hubs_cache_links_to_its_own_blobs(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--org--name"
    blobs, snapshot = cache / "blobs", cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:040}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040}")
    for way in WEIGHTS.values():
        way(snapshot)
    other = tmp_path / "hub" / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "a").write_bytes((snapshot / "model.safetensors").read_bytes())
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../../models--org--other/blobs/a")
    for way in WEIGHTS.values():
        with pytest.raises(ModelError, match="of the folder itself"):
            way(snapshot)


def test_other_weights_beside_them_are_not_looked_at(folder: Path) -> None:
    (folder / "pytorch_model.bin").touch()
    os.truncate(folder / "pytorch_model.bin", 2**30)
    (folder / "model.gguf").symlink_to("/dev/null")
    for way in (*WEIGHTS.values(), *CONFIGS.values()):
        way(folder)


STRANGE: dict[str, Any] = {
    "a text for a size": {"hidden_size": "x"},
    "a list for a size": {"hidden_size": [1]},
    "no heads": {"num_attention_heads": 0},
    "half a head": {"num_attention_heads": 1.5},
    "less than nothing": {"hidden_size": -4},
    "no layers' names": {"layer_types": ["evil"]},
    "an activation of no name": {"hidden_act": "evil"},
    "a list for a type": {"model_type": ["qwen3"]},
    "a table for a dtype": {"dtype": {"a": 1}},
    "strange rope": {"rope_parameters": {"rope_type": "evil"}},
    "rope of no kind": {"rope_parameters": [1, 2]},
    "strange tokens": {"eos_token_id": "x", "pad_token_id": 10**9},
    "a quantization of no kind": {"quantization_config": {"quant_method": "evil"}},
}


@pytest.mark.parametrize("way", CONFIGS)
@pytest.mark.parametrize("settings", STRANGE.values(), ids=STRANGE)
def test_a_config_that_transformers_refuses_is_one_line(folder: Path, settings: dict[str, Any], way: str) -> None:
    set_config(folder, **settings)
    try:
        CONFIGS[way](folder)  # some settings are taken, by some of transformers' versions
    except ModelError as error:
        assert "\n" not in str(error) and str(folder) in str(error)


@pytest.mark.parametrize("text", ["", "[]", "1", "null", "{", "[" * 100_000, '{"a": ' * 100_000, "\x00"])
@pytest.mark.parametrize("way", CONFIGS)
def test_a_config_that_is_none_is_one_line(folder: Path, text: str, way: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError) as said:
        CONFIGS[way](folder)
    assert "\n" not in str(said.value) and str(folder) in str(said.value)


@pytest.mark.parametrize("text", ["[]", "{}", "[" * 100_000, '{"model": 1, "version": "1.0"}', '{"added_tokens": 1}'])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("way", TOKENIZERS)
def test_a_tokenizer_that_is_none_is_one_line(folder: Path, file: str, text: str, way: str) -> None:
    (folder / file).write_text(text)
    try:
        TOKENIZERS[way](folder)
    except BadInput as error:
        assert "\n" not in str(error) and str(folder) in str(error)


def test_a_model_s_own_code_is_not_run_nor_asked_about(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, mapped = tmp_path / "marker", {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    set_config(folder, model_type="evil", auto_map=mapped)
    (folder / "evil.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()\nclass Evil: pass\n")
    monkeypatch.setattr(builtins, "input", lambda text="": "y")  # transformers would ask, and somebody say yes
    for way in CONFIGS.values():
        with pytest.raises(ModelError):
            way(folder)
    assert not marker.exists()
