"""A model folder whose weights aren't those that its config describes: one line, before a site starts."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer_prime.errors import ModelError
from composer_prime.sites.embedded.model import load_policy, main
from tests.cli.command_line import call
from tests.sites.family_run import save_model
from tests.sites.test_hostile_folders import set_config
from tests.sites.test_preflight import written
from tests.sites.tiny_folder import save_random_tiny

WEIGHTS = "model.safetensors"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_tiny(tmp_path_factory.mktemp("sound") / "model", tie_word_embeddings=False)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def change(folder: Path, changed: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(changed(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: change(folder, lambda held: {each: held[each] for each in held if each not in names})


def added(**tensors: Tensor) -> Callable[[Path], None]:
    return lambda folder: change(folder, lambda held: held | tensors)


def of_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    return lambda folder: change(folder, lambda held: {name: held[name].to(dtype) for name in held})


def says(**settings: Any) -> Callable[[Path], None]:
    return lambda folder: set_config(folder, **settings)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no head": (without("lm_head.weight"), "lacks lm_head.weight, which would be random: set tie_word_embeddings"),
    "no norm": (without(NORM), f"lacks {NORM}, which would be random: add what is missing"),
    "another layer": (
        added(**{"model.layers.9.mlp.up_proj.weight": torch.ones(2)}),
        "holds model.layers.9.mlp.up_proj",
    ),
    "fewer layers": (says(num_hidden_layers=1, layer_types=["full_attention"]), "and 8 more, for which the model that"),
    "vocabulary": (
        says(vocab_size=300),
        "holds lm_head.weight of shape (265, 128), where config.json asks for (300, 128)",
    ),
    "dtype": (of_dtype(torch.bfloat16), "says dtype float32, and the weights are bfloat16: set it to what they are"),
    "old dtype": (says(dtype=None, torch_dtype="float16"), "says dtype float16, and the weights are float32"),
    "quantized": (of_dtype(torch.float8_e4m3fn), "weights of dtype F8_E4M3, which can't be trained"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_parameter_that_would_be_made_up_dropped_or_reshaped_is_named(fault, folder, capsys):
    spoil, told = FAULTS[fault]
    spoil(folder)
    assert main([str(folder), "0", str(folder.parent / "cache"), "cpu"]) == 2
    said = capsys.readouterr()
    assert told in said.err and said.err.count("\n") == 1 and said.out == ""


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: [each(folder) for each in (without("lm_head.weight"), says(tie_word_embeddings=True))],
        lambda folder: [each(folder) for each in (of_dtype(torch.bfloat16), says(dtype="bfloat16"))],
        says(dtype=None),
    ],
    ids=["tied", "bfloat16", "no dtype"],
)
def test_what_is_all_there_is_loaded(spoil, folder):
    spoil(folder)
    assert main([str(folder), "0", str(folder.parent / "cache"), "cpu"]) == 0
    held, policy = load_file(folder / WEIGHTS), dict(load_policy(folder).named_parameters())
    assert policy.keys() == held.keys() and all(torch.equal(policy[name], held[name].float()) for name in policy)


def test_a_run_with_such_a_folder_starts_no_site(folder, tmp_path, capsys, monkeypatch):
    without("lm_head.weight")(folder)
    recipe = written(tmp_path, model={"name": str(folder)}, output_dir=str(tmp_path / "out"))
    answer = call(capsys, monkeypatch, "run", recipe)
    assert answer.code == 2 and "lacks lm_head.weight, which would be random" in answer.err.splitlines()[-1]
    assert not [*tmp_path.glob("out/*/sites")] and not [*tmp_path.rglob("trainer.log")]


def test_layers_with_recurrent_state_are_refused_before_a_site_starts_unless_vllm_serves(tmp_path, capsys):
    save_model(tmp_path, "qwen3.5")
    asked = [str(tmp_path), "0", str(tmp_path / "cache"), "cpu"]
    assert (main(asked), main([*asked, "vllm"])) == (2, 0)
    assert "has layers with recurrent state, which inference.engine transformers can't batch" in capsys.readouterr().err


def test_a_policy_that_lacks_a_part_is_never_loaded(folder):
    without(NORM)(folder)
    with pytest.raises(ModelError, match="would be random"):
        load_policy(folder)
