"""From a model's name in the recipe to a local folder, and from such a folder to a policy.

Models of tiny_policy's are made on the spot and cached by seed and device; a folder is checked before anything starts
from it; any other name is a Hugging Face id. `python -m composer_prime.sites.embedded.model NAME SEED CACHE_DIR
DEVICE` prints the folder; a fifth argument, WITHOUT_WEIGHTS, spares weights that would have to be downloaded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from composer_prime.config.model_folder import check_dtypes, check_loaded, loading, weight_files
from composer_prime.config.recipe import TINY, TINY_MODELS
from composer_prime.config.settings import WITHOUT_WEIGHTS
from composer_prime.errors import BadInput, ModelError, last_words
from composer_prime.outer.fragments import NamedShape, trainable
from composer_prime.sites.embedded.installed import check_device, check_maker
from composer_prime.sites.intact import SUMS, damage, seal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Progress = Callable[[str], None]
"""Told how far a model's warm-up is."""

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
"""No others: who writes a pickle writes a program."""
_DESCRIBING = ("*.json", "*.model", "*.txt", "*.jinja")
_WANTED = (*_DESCRIBING, "*.safetensors")
_loading = threading.Lock()
"""transformers changes torch's global state while it loads: of two models at once one may lack its tied weights."""


def resolve_model(
    name: str,
    seed: int,
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    spare_weights: bool = False,
    device: str = "cpu",
) -> Path:
    """The local folder (absolute) of the model that `model.name` stands for.

    name         one of TINY_MODELS, a folder (it exists, or looks like a path), or a Hugging Face id, which is
                 downloaded.
    seed         of a tiny model's weights and warm-up; nothing else depends on it.
    cache_dir    where tiny models are kept. Two processes that build the same one both end up with it.
    spare_weights   weights that aren't on this machine are not downloaded: who joins a run has its masters instead.
                    The folder is then one marked WITHOUT_WEIGHTS.
    device          where a tiny model is warmed up. Devices round differently, so each has models of its own.

    Raises ModelError when there is no such model, its folder lacks a file, or its maker isn't installed; ConfigError
    when torch doesn't have the device.
    """
    check_device(device)
    if name in TINY_MODELS:
        return _tiny_folder(name, seed, cache_dir, progress, device)
    folder = Path(name).expanduser()
    if not folder.exists() and not _looks_like_path(name):
        folder = _spared(name, cache_dir) if spare_weights else _download(name)
    _check_folder(name, folder)
    return folder.resolve()


def describe_model(name: str, folder: Path) -> Path:
    """A folder that holds the model's configuration and tokenizer: `folder` for one of TINY_MODELS, which is filled.

    Raises ModelError as `resolve_model`.
    """
    if name in TINY_MODELS:
        tiny_models(name).describe(name, folder)
        return folder
    check_name(name)
    local = Path(name).expanduser()
    return local.resolve() if local.exists() else _download(name, _DESCRIBING)


def check_name(name: str) -> None:
    """Raise ModelError for a name that can be no model's on this machine or the Hugging Face hub. Asks nobody."""
    local = Path(name).expanduser()
    if name not in TINY_MODELS and (local.exists() or _looks_like_path(name)):
        _check_folder(name, local)


def load_policy(folder: Path, device: str = "cpu") -> PreTrainedModel:
    """The causal LM in that folder: fp32 on the device, in eval mode, its parameters trainable.

    In a folder WITHOUT_WEIGHTS every value is arbitrary until masters, or what a trainer publishes, are put in.

    May be called in several threads. Raises ModelError when its files can't be read as one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # our processes write to logs
    as_we_train: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
    here = {"local_files_only": True, "trust_remote_code": False}
    with loading(f"model folder {folder}", "give a causal LM's"):
        with _loading:
            weight_files(folder)
            config = AutoConfig.from_pretrained(folder, **here)
            as_we_train["attn_implementation"] = _attention(config)
            if (folder / WITHOUT_WEIGHTS).exists():
                model = AutoModelForCausalLM.from_config(config, **as_we_train)
                if (folder / GENERATION_FILE).exists():
                    model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
            else:
                whole = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
                loaded = AutoModelForCausalLM.from_pretrained(
                    folder, **whole, **as_we_train, ignore_mismatched_sizes=True
                )
                model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)  # as output_loading_info has it
                check_loaded(folder, info)
        return model.eval().to(device)  # pyright: ignore[reportArgumentType] (transformers wraps it)


def _attention(config: Any) -> str:
    """transformers' attention for a model: torch's own where its class has it, which a few haven't."""
    from transformers import AutoModelForCausalLM

    known: Any = AutoModelForCausalLM._model_mapping
    return "sdpa" if type(config) not in known or getattr(known[type(config)], "_supports_sdpa", True) else "eager"


def check_attends(model: PreTrainedModel, folder: Path) -> None:
    """Raise ModelError for a model that inference.engine transformers can't serve."""
    if getattr(model, "_is_stateful", False):  # transformers' mark of models that don't keep keys and values alone
        raise ModelError(
            f"model folder {folder} has layers with recurrent state, which inference.engine transformers can't batch: "
            "use inference.engine vllm"
        )


def _tiny_folder(name: str, seed: int, cache_dir: Path, progress: Progress | None, device: str) -> Path:
    warmed = "" if device == "cpu" else f"-{device}"
    makers = tiny_models(name)
    folder = cache_dir.absolute() / f"{makers.key(name)}-seed{seed}{warmed}"
    if folder.exists() and damage(folder / SUMS) is None:
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=cache_dir) as scratch:
            made = Path(scratch) / "model"
            makers.make(name, made, seed, progress, device=device)
            _move_into_place(made, folder)
    except OSError as error:
        raise ModelError(
            f"{name} model can't be kept in {cache_dir}: {error}; make the folder writable, or set XDG_CACHE_HOME"
        ) from error
    return folder


def tiny_models(name: str) -> Any:
    """The module of tiny_policy that makes the models of TINY_MODELS, for one of these. Imports no torch.

    Raises ModelError where it isn't installed.
    """
    check_maker(name)
    from tiny_policy.built_in import models

    return models


def _move_into_place(made: Path, folder: Path) -> None:
    """Rename, unless another process was first: its model, made from the same seed, then serves as well.

    A folder that isn't what was written is replaced.
    """
    seal(made)
    if folder.is_dir() and (cause := damage(folder / SUMS)) is not None:
        print(f"model folder {folder} is damaged ({cause}): made again", file=sys.stderr, flush=True)
        os.rename(folder, made.with_name("damaged"))
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.endswith("/") or name in (".", "..")


def _check_folder(name: str, folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "doesn't exist"
        raise ModelError(f'model.name ({name}) {what}: give a model folder, a Hugging Face id, or "{TINY}"')
    missing = [
        wanted
        for wanted, files in (
            (CONFIG_FILE, (CONFIG_FILE,)),
            ("a tokenizer (tokenizer.json)", TOKENIZER_FILES),
            ("weights (model.safetensors)", (*WEIGHT_FILES, WITHOUT_WEIGHTS)),
        )
        if not any((folder / file).is_file() for file in files)
    ]
    if missing:
        raise ModelError(
            f"model folder {folder} is not one, it lacks {' and '.join(missing)}: give a folder that "
            "save_pretrained wrote for model and tokenizer"
        )
    check_dtypes(folder, weight_files(folder))


def _spared(name: str, cache_dir: Path) -> Path:
    """The model's folder on this machine, where that is whole; else one of configuration and tokenizer."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    described = _download(name, _DESCRIBING)
    try:
        wanted: list[str] = [*_WANTED]
        return Path(snapshot_download(name, revision=described.name, allow_patterns=wanted, local_files_only=True))
    except LocalEntryNotFoundError:
        pass  # as expected of who never had the model; also when a download of it broke off
    files = [file for pattern in _DESCRIBING for file in described.glob(pattern) if file.name not in WEIGHT_FILES]
    folder = cache_dir.absolute() / f"{name.replace('/', '--')}-{described.name}-without-weights"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=cache_dir) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            for file in files:
                shutil.copyfile(file, made / file.name)
            (made / WITHOUT_WEIGHTS).touch()
            _move_into_place(made, folder)
    except OSError as error:
        raise ModelError(f"the model's configuration can't be kept in {cache_dir}: {error}; free some space") from error
    return folder


def _download(name: str, patterns: tuple[str, ...] = _WANTED) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, HFValidationError) as error:  # OSError: hub HTTP errors, no network, and not in the local cache
        cause = error.__cause__ or error
        raise ModelError(
            f"model.name ({name}) can't be downloaded from the Hugging Face hub: {_first_line(cause)}; check the id, "
            f'the network and HF_TOKEN, or give a local folder or "{TINY}"'
        ) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def named_shapes(name: str) -> list[NamedShape]:
    """(name, shape) of every trainable parameter, tied ones once, in the model's own order.

    The model is built on the meta device, so that `plan` of a large one takes seconds and no memory.

    name  one of TINY_MODELS, a local folder, or a Hugging Face id, of which only the configuration is downloaded.

    Raises ModelError when there is no such model, and without torch and transformers.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise ModelError(f"the size of {name} isn't known without {error.name}: pip install {error.name}") from None

    config = _config(name)
    with loading(f"model.name ({name})", "name a causal language model"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return [(parameter, tuple(values.shape)) for parameter, values in trainable(model.named_parameters())]


def _config(name: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    if name in TINY_MODELS:
        return tiny_models(name).BUILT_IN[name].config()
    folder = Path(name).expanduser()
    is_folder = folder.exists() or name.startswith(("/", ".", "~"))
    if is_folder and not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"model.name ({name}) is no model folder, it has no config.json: give a folder that has one")
    if is_folder:
        weight_files(folder)
    with loading(f"model.name ({name})", "give a model folder or a hub id"):
        return AutoConfig.from_pretrained(folder if is_folder else name, trust_remote_code=False)


def main(arguments: list[str]) -> int:
    """Print the folder of a model as the last line of stdout; 2 when the person must change something."""
    name, seed, cache_dir, device, *asked = arguments

    def show(progress: str) -> None:
        print(f"warm-up {progress}", file=sys.stderr, flush=True)

    try:
        folder = resolve_model(
            name, int(seed), Path(cache_dir), show, spare_weights=WITHOUT_WEIGHTS in asked, device=device
        )
        if name not in TINY_MODELS and not (folder / WITHOUT_WEIGHTS).exists():
            policy = load_policy(folder)  # once, before all who would say the same
            if "vllm" not in asked:
                check_attends(policy, folder)
    except (BadInput, OSError) as error:
        return last_words(error)
    print(folder)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main(sys.argv[1:]))
    raise SystemExit(130)
