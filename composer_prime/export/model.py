"""A Hugging Face model whose trained parameters are a run's masters; all else is as in the model it started from."""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from composer_prime.config.model_folder import loading, weight_files
from composer_prime.errors import ModelError
from composer_prime.export.bits import Bits, as_bits, as_values
from composer_prime.outer.fragments import Fragment, NamedShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_SHARD = "4GB"
"""Weights larger than this are cut into several files with an index, as transformers does it."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_OWN = ("README.md", "composer-prime.json")
_QKV = ".qkv_proj."
_GATE_UP, _DOWN, _ROUTER = ".experts.gate_up_proj", ".experts.down_proj", ".gate.weight"


class Exportable(Protocol):
    """What a snapshot is written from: a whole model (`HfModel`) or a LoRA adapter (`lora.LoraAdapter`)."""

    dtype: torch.dtype

    def read(self, index: int) -> Bits:
        """The bits of a fragment as it is now, in new memory."""
        ...

    def write(self, index: int, bits: Bits) -> None:
        """Set a fragment to these bits."""
        ...

    def save(self, folder: Path) -> None:
        """Write all that Hugging Face's loaders need into `folder`, which is there."""
        ...


class HfModel:
    """One model in memory, in one dtype, of which snapshot after snapshot can be written.

    Frozen parameters and buffers keep the base model's values, rounded to the dtype; tied parameters follow.
    """

    def __init__(self, base: Path, dtype: torch.dtype, fragments: Sequence[Fragment]) -> None:
        """
        base       folder of the model that the run was created from: config, tokenizer, weights
        fragments  the run's

        Raises ModelError when it can't be loaded, or hasn't the parameters that the run trains.
        """
        self.base = base
        self.dtype = dtype
        self._fragments = fragments
        self._model = _load(base, dtype)
        shapes = [pair for fragment in fragments for pair in zip(fragment.names, fragment.shapes, strict=True)]
        self._tensors = trained_tensors(self._model, shapes)

    def read(self, index: int) -> Bits:
        fragment = self._fragments[index]
        flat = torch.empty(fragment.numel, dtype=self.dtype)
        for tensor, span in self._places(fragment):
            flat[span] = tensor.reshape(-1)
        return as_bits(flat)

    @torch.no_grad()
    def write(self, index: int, bits: Bits) -> None:
        flat = as_values(bits, self.dtype)
        for tensor, span in self._places(self._fragments[index]):
            tensor.copy_(flat[span].view(tensor.shape))

    def _places(self, fragment: Fragment) -> Iterator[tuple[Tensor, slice]]:
        """Each of the model's tensors with its span of the fragment's flat vector."""
        start = 0
        for name in fragment.names:
            for tensor in self._tensors[name]:
                yield tensor, slice(start, start + tensor.numel())
                start += tensor.numel()

    def save(self, folder: Path) -> None:
        """Config, weights, and the base model's tokenizer and other small files."""
        self._model.save_pretrained(folder, max_shard_size=MAX_SHARD)
        share_weights(folder)
        copy_small_files(self.base, folder)


def trained_tensors(model: nn.Module, named_shapes: Sequence[NamedShape]) -> dict[str, list[Tensor]]:
    """The model's own tensor, part of one, or several that are one below each other, for each parameter of a run.

    named_shapes   as the run's manifest states them

    With transformers' own classes the names are equal. PRIME-RL's classes for mixture-of-experts models keep each
    layer's experts as w1, w2, w3 (later gate_proj, up_proj, down_proj) and call the router another name; their tensors
    are parts of transformers' fused ones. By `model.fusions` the queries', keys' and values' projections are one.

    Raises ModelError when the model lacks one, has it in another shape, or ties what the run trains apart.

    Source: PRIME-RL's trainer/models/qwen3_moe/converting_qwen3_moe.py (`conversion_chain`), trainer/models/fusions.py.
    """
    known = _views(model)
    found: dict[str, list[Tensor]] = {}
    places: dict[tuple[int, int], str] = {}
    for name, shape in named_shapes:
        parts = _parts(name, known)
        held = (sum(len(part) for part in parts), *parts[0].shape[1:]) if parts else None
        if held != tuple(shape):
            has = "doesn't have it" if held is None else f"has it in shape {held}"
            raise ModelError(
                f"the run trains {name} in shape {tuple(shape)}, the model given {has}: name with --model the model "
                "that the run was created from"
            )
        for part in parts:
            place = (part.data_ptr(), part.numel())
            if place in places:
                raise ModelError(
                    f"the run trains {name} apart from {places[place]}, the model given ties them: set "
                    "tie_word_embeddings to false in a copy of its config.json, and name that folder with --model"
                )
            places[place] = name
        found[name] = parts
    return found


def _parts(name: str, known: Mapping[str, Tensor]) -> list[Tensor]:
    """What a parameter consists of, along its first dimension; nothing where the model lacks it."""
    stem, fused, end = name.rpartition(_QKV)
    names = [f"{stem}.{one}_proj.{end}" for one in "qkv"] if fused and name not in known else [name]
    return [known[one] for one in names] if all(one in known for one in names) else []


def _views(model: nn.Module) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        values = parameter.detach()
        views[name] = values
        if name.endswith(_GATE_UP):
            stem, middle = name.removesuffix("gate_up_proj"), values.shape[1] // 2
            views[f"{stem}w1"] = views[f"{stem}gate_proj"] = values[:, :middle]
            views[f"{stem}w3"] = views[f"{stem}up_proj"] = values[:, middle:]
        elif name.endswith(_DOWN):
            views[f"{name.removesuffix('down_proj')}w2"] = values
        elif name.endswith(_ROUTER):
            views[f"{name.removesuffix(_ROUTER)}.router.gate.weight"] = values
    return views


def share_weights(folder: Path) -> None:
    """Give weights, which safetensors writes for this user alone, the mode of every other file: the umask's."""
    os.umask(umask := os.umask(0))
    for file in folder.glob("*.safetensors"):
        file.chmod(0o666 & ~umask)


def copy_small_files(base: Path, folder: Path, without: Collection[str] = ()) -> None:
    """Everything beside the weights that `folder` hasn't got, but `without`: tokenizer, chat template, licence."""
    for file in sorted(base.iterdir()):
        target = folder / file.name
        wanted = not file.name.startswith(".") and not file.name.endswith(_WEIGHTS)
        if wanted and file.name not in (*_OWN, *without) and file.is_file() and not target.exists():
            shutil.copyfile(file, target)


def _load(base: Path, dtype: torch.dtype) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    safely = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    with loading(f"model folder {base}", "give a causal language model's"):
        weight_files(base)
        return AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **safely).eval()


@contextlib.contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside `folder`, which takes its place at the end of the block; gone after an error.

    Readers see all of it or nothing. `folder` must not be there, or be empty.
    """
    making = folder.parent / f".{folder.name}.making"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    try:
        yield making
        making.rename(folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
