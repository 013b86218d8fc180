"""A model folder made for vLLM: new weights under the model's own tokenizer and config, tied weights spelled out.

vLLM on a CPU packs an output head once and, when it is tied to the embeddings, keeps that packing through a reload:
the policy would have a new body and an old head. A model that says its head isn't tied is reloaded whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from composer_prime.config.model_folder import INDEX_FILE, loading, weight_files
from composer_prime.errors import ModelError

CONFIG_FILE = "config.json"
TIED_FILE = "tied.safetensors"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def tied_names(model: nn.Module) -> dict[str, str]:
    """The other names of tied parameters, each with the name under which `named_parameters` has it."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def make_whole_folder(target: Path, *, model_dir: Path, weight_dir: Path, tied: Mapping[str, str]) -> None:
    """Fill `target`, an empty folder, by links to the weights and to everything else of the model.

    weight_dir  holds `*.safetensors`; it may be `model_dir`.
    tied        from `tied_names`: what is written out under a name of its own, which the config then says.

    Raises ModelError when there are no such weights.
    """
    weight_files(model_dir)
    files = weight_files(weight_dir)  # of those an index names, where there is one: a folder may hold the same twice
    if not files:
        raise ModelError(
            f"model folder {weight_dir} has no *.safetensors, which inference.engine vllm needs: convert it"
        )
    with loading(f"model folder {weight_dir}", "save the model again"):
        places = {name: file for file in files for name in _names(file)}
    spelled_out = {
        name: _read(places[source], source) for name, source in tied.items() if name not in places and source in places
    }
    others = [file for file in model_dir.iterdir() if file.is_file() and not file.name.endswith(_WEIGHTS)]
    for file in others:
        if file.name != CONFIG_FILE:
            (target / file.name).symlink_to(file.resolve())
    # Not under their own names: a loader that finds "model.safetensors" doesn't look into the index.
    links = {file: f"part-{number}.safetensors" for number, file in enumerate(files)}
    for file, link in links.items():
        (target / link).symlink_to(file.resolve())
    if spelled_out:
        save_file(spelled_out, target / TIED_FILE)
    index = {name: links[file] for name, file in places.items()} | dict.fromkeys(spelled_out, TIED_FILE)
    (target / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((model_dir / CONFIG_FILE).read_text())
    (target / CONFIG_FILE).write_text(json.dumps(_untied(config) if tied else config))


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    if isinstance(config.get("text_config"), dict):
        config = config | {"text_config": config["text_config"] | {"tie_word_embeddings": False}}
    return config | {"tie_word_embeddings": False}
