"""Which parameters travel together: the strided fragments of Streaming DiLoCo (arXiv:2501.18512, section 3.1).

A plan follows from names and shapes alone, so every process of every site makes the same one without talking.
No torch at import: the CLI prints plans.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer_prime.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

NamedShape = tuple[str, tuple[int, ...]]

WRAPPER_COMPONENTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
"""Path components that activation checkpointing and torch.compile put into parameter names."""

FP32_BYTES = 4


@dataclass(frozen=True)
class Fragment:
    """A fixed set of parameters that is offered, committed and adopted as one flat fp32 vector, in this order."""

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        """Number of elements of the flat vector."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """Size of the flat vector in bytes of fp32."""
        return FP32_BYTES * self.numel


def plan_fragments(named_shapes: Sequence[NamedShape], num_fragments: int) -> tuple[Fragment, ...]:
    """Deal a model's blocks to `num_fragments` fragments: block i goes to fragment i mod P.

    named_shapes   (name, shape) of each trainable parameter, in the model's own order, as `trainable` gives them.
    num_fragments  P, 1 to the number of blocks.

    Blocks in order: embeddings (what comes before the first numbered layer), the layers by number, head (the rest).
    Within a fragment, parameters stand by block and then by name. The order in which names are passed matters only
    for telling embeddings from head and, in a model without numbered layers, for the order of its modules.

    Raises ConfigError when P is out of bounds, a name comes twice, or nothing is trainable.
    """
    blocks = _blocks(named_shapes)
    if not 1 <= num_fragments <= len(blocks):
        raise ConfigError(
            f"outer.fragments ({num_fragments}) must be between 1 and the number of blocks of this model "
            f"({len(blocks)}): set outer.fragments to {min(max(num_fragments, 1), len(blocks))}"
        )
    fragments = []
    for index in range(num_fragments):
        members = [member for block in blocks[index::num_fragments] for member in block]
        names, shapes = zip(*members, strict=True)
        fragments.append(Fragment(index, names, shapes))
    return tuple(fragments)


def trainable(named_parameters: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The parameters that take part in the outer loop, under names that don't depend on wrappers.

    Frozen parameters are left out; of parameters that share memory only the first stays (tied embeddings, also when
    they come from `named_parameters(remove_duplicate=False)`). The tensors are the model's own, not copies.
    """
    kept: list[tuple[str, Tensor]] = []
    seen: set[object] = set()
    for name, parameter in named_parameters:
        identity = _identity(parameter)
        if not parameter.requires_grad or identity in seen:
            continue
        seen.add(identity)
        kept.append((_bare_name(name), parameter))
    return kept


def model_fingerprint(named_shapes: Sequence[NamedShape]) -> str:
    """sha256 (hex) of the blocks with their names and shapes: equal fingerprints mean equal plans for every P.

    Values and dtypes are left out on purpose: each site keeps its own dtype, and the masters have hashes of their own.
    """
    return hashlib.sha256(json.dumps(_blocks(named_shapes), separators=(",", ":")).encode()).hexdigest()


def _blocks(named_shapes: Sequence[NamedShape]) -> list[list[NamedShape]]:
    """The model's blocks in order, each sorted by parameter name."""
    shapes = {name: tuple(int(size) for size in shape) for name, shape in named_shapes}
    if not shapes:
        raise ConfigError("the model has 0 trainable parameters, the outer loop needs at least 1: unfreeze some")
    if len(shapes) != len(named_shapes):
        names = [name for name, _ in named_shapes]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"parameter name {twice} comes {names.count(twice)} times, 1 is the limit: rename one")
    grouped: dict[object, list[NamedShape]] = {}
    for key, name in zip(_block_keys(list(shapes)), shapes, strict=True):
        grouped.setdefault(key, []).append((name, shapes[name]))
    return [sorted(block) for block in _in_order(grouped)]


def _block_keys(names: list[str]) -> list[object]:
    """For each name the key of its block: a layer's number, "embeddings", "head", or a top-level module's name."""
    numbers = [_layer_number(name) for name in names]
    first = next((place for place, number in enumerate(numbers) if number is not None), None)
    if first is None:
        return [name.split(".", 1)[0] for name in names]
    return [
        number if number is not None else "embeddings" if place < first else "head"
        for place, number in enumerate(numbers)
    ]


def _in_order(grouped: dict[object, list[NamedShape]]) -> list[list[NamedShape]]:
    layers = sorted(key for key in grouped if isinstance(key, int))
    if not layers:
        return list(grouped.values())
    return [grouped[key] for key in ("embeddings", *layers, "head") if key in grouped]


def _layer_number(name: str) -> int | None:
    """The first path component that is a number: 3 in `model.layers.3.mlp.experts.7.weight`."""
    return next((int(part) for part in name.split(".") if part.isascii() and part.isdigit()), None)


def _bare_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPER_COMPONENTS)


def _identity(parameter: Tensor) -> object:
    """Equal for parameters that are one and the same memory. Meta tensors and DTensors have no address: by object."""
    address = parameter.data_ptr() if parameter.numel() else 0
    return (parameter.device, address, parameter.numel()) if address else id(parameter)
