"""A run that trained LoRA adapters alone, as the adapter folder that PEFT and vLLM read.

Trainers name the two halves `<module>.lora_A.0` (PRIME-RL), `<module>.lora_A.default.weight` (PEFT) or without an
ending; files hold `base_model.model.<module>.lora_A.weight`.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from composer_prime.errors import BadInput, ModelError
from composer_prime.export.bits import Bits, as_bits, as_values
from composer_prime.export.model import copy_small_files, share_weights
from composer_prime.outer.fragments import Fragment, NamedShape
from composer_prime.outer.pseudograd import places

_HALF = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.(?P<half>lora_[AB])(?:\.(?:0|default))?(?:\.weight)?")
_OF_WHOLE_MODELS = ("config.json", "generation_config.json")
"""An adapter folder that has them is taken for a whole model."""


def is_lora(names: Sequence[str]) -> bool:
    """Whether a run trains adapters."""
    return any(_HALF.fullmatch(name) for name in names)


class LoraAdapter:
    """The adapters of a run, in one dtype. See `model.Exportable`."""

    def __init__(
        self, base: Path, dtype: torch.dtype, fragments: Sequence[Fragment], *, base_name: str, alpha: float | None
    ) -> None:
        """
        base       folder of the model under the adapters, whose tokenizer is copied
        base_name  as the adapter's config names that model
        alpha      LoRA's alpha: the adapters count alpha / rank times

        Raises BadInput without alpha, ModelError when the run trains anything but adapters of one rank.
        """
        if alpha is None:
            raise BadInput("the run trains LoRA adapters, and its records don't say their alpha: add --lora-alpha")
        self.dtype = dtype
        self._base, self._base_name, self._alpha = base, base_name, alpha
        self._fragments = fragments
        shapes = [pair for fragment in fragments for pair in zip(fragment.names, fragment.shapes, strict=True)]
        self._rank = _rank(shapes)
        self._tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes}

    def read(self, index: int) -> Bits:
        fragment = self._fragments[index]
        return as_bits(torch.cat([tensor.reshape(-1) for tensor, _, _ in places(self._tensors, fragment)]))

    def write(self, index: int, bits: Bits) -> None:
        flat = as_values(bits, self.dtype)
        for tensor, start, stop in places(self._tensors, self._fragments[index]):
            tensor.copy_(flat[start:stop].view(tensor.shape))

    def save(self, folder: Path) -> None:
        """adapter_model.safetensors, adapter_config.json and the base model's tokenizer."""
        halves = {_parts(name): tensor for name, tensor in self._tensors.items()}
        filed = {f"base_model.model.{module}.{half}.weight": tensor for (module, half), tensor in halves.items()}
        save_file(filed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        share_weights(folder)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._base_name,
            "r": self._rank,
            "lora_alpha": self._alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted({module for module, _ in halves}),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_small_files(self._base, folder, without=_OF_WHOLE_MODELS)


def _parts(name: str) -> tuple[str, str]:
    """(module, "lora_A" or "lora_B") of a parameter's name. Raises ModelError for any other parameter."""
    match = _HALF.fullmatch(name)
    if match is None:
        raise ModelError(
            f"the run trains {name} beside its LoRA adapters, which an adapter folder can't hold: "
            "train adapters alone (no modules_to_save, no experts' adapters), or the whole model"
        )
    return match["module"], match["half"]


def _rank(shapes: Sequence[NamedShape]) -> int:
    ranks: dict[int, str] = {}
    for name, shape in shapes:
        _, half = _parts(name)
        if len(shape) != 2:
            raise ModelError(
                f"the run's adapter {name} has shape {shape}, 2 sizes are the limit: adapt linear layers only"
            )
        ranks.setdefault(shape[0 if half == "lora_A" else 1], name)
    if len(ranks) != 1:
        shown = ", ".join(f"{rank} ({name})" for rank, name in sorted(ranks.items()))
        raise ModelError(f"the run's adapters have ranks {shown}, one adapter folder holds 1: train all with one rank")
    return next(iter(ranks))
