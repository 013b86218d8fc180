"""From the names that trainers give parameters to the parameters of transformers' model.

With transformers' own classes the names are equal. PRIME-RL's classes for mixture-of-experts models keep each layer's
experts as w1, w2, w3 and call the router another name; their tensors are parts of transformers' fused ones.

Source: `conversion_chain` in PRIME-RL's trainer/models/qwen3_moe/converting_qwen3_moe.py.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from composer_prime.errors import ModelError
from composer_prime.outer.fragments import NamedShape

_GATE_UP, _DOWN, _ROUTER = ".experts.gate_up_proj", ".experts.down_proj", ".gate.weight"


def trained_tensors(model: nn.Module, named_shapes: Sequence[NamedShape]) -> dict[str, Tensor]:
    """The model's own tensor, or part of one, for each parameter of a run.

    named_shapes   as the run's manifest states them

    Raises ModelError when the model lacks one, has it in another shape, or ties what the run trains apart.
    """
    known = _views(model)
    found: dict[str, Tensor] = {}
    places: dict[tuple[int, int], str] = {}
    for name, shape in named_shapes:
        tensor = known.get(name)
        if tensor is None or tuple(tensor.shape) != tuple(shape):
            held = "doesn't have it" if tensor is None else f"has it in shape {tuple(tensor.shape)}"
            raise ModelError(
                f"the run trains {name} in shape {tuple(shape)}, the model given {held}: name with --model the model "
                "that the run was created from (layouts fused by PRIME-RL's model.fusions can't be exported)"
            )
        place = (tensor.data_ptr(), tensor.numel())
        if place in places:
            raise ModelError(
                f"the run trains {name} apart from {places[place]}, the model given ties them: set "
                "tie_word_embeddings to false in a copy of its config.json, and name that folder with --model"
            )
        places[place] = name
        found[name] = tensor
    return found


def _views(model: nn.Module) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        values = parameter.detach()
        views[name] = values
        if name.endswith(_GATE_UP):
            stem, middle = name.removesuffix("gate_up_proj"), values.shape[1] // 2
            views[f"{stem}w1"], views[f"{stem}w3"] = values[:, :middle], values[:, middle:]
        elif name.endswith(_DOWN):
            views[f"{name.removesuffix('down_proj')}w2"] = values
        elif name.endswith(_ROUTER):
            views[f"{name.removesuffix(_ROUTER)}.router.gate.weight"] = values
    return views
