"""From the names that trainers give parameters to the parameters of transformers' model.

With transformers' own classes the names are equal. PRIME-RL's classes for mixture-of-experts models keep each layer's
experts as w1, w2, w3 (later gate_proj, up_proj, down_proj) and call the router another name; their tensors are parts of
transformers' fused ones. By `model.fusions` the queries', keys' and values' projections are one tensor instead.

Source: `conversion_chain` in PRIME-RL's trainer/models/qwen3_moe/converting_qwen3_moe.py; trainer/models/fusions.py.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from composer_prime.errors import ModelError
from composer_prime.outer.fragments import NamedShape

_QKV = ".qkv_proj."
_GATE_UP, _DOWN, _ROUTER = ".experts.gate_up_proj", ".experts.down_proj", ".gate.weight"


def trained_tensors(model: nn.Module, named_shapes: Sequence[NamedShape]) -> dict[str, list[Tensor]]:
    """The model's own tensor, part of one, or several that are one below each other, for each parameter of a run.

    named_shapes   as the run's manifest states them

    Raises ModelError when the model lacks one, has it in another shape, or ties what the run trains apart.
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
