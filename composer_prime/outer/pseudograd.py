"""Between a model's parameters and one flat fp32 vector per fragment, and the pseudo-gradient of two such vectors.

A site may hold bf16 parameters while masters are fp32; what it adopted is what its parameters hold after rounding,
so `write_back` returns that, and pseudo-gradients are taken against it (otherwise rounding would be sent as work).
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from composer_prime.errors import SiteError
from composer_prime.outer.chunks import empty
from composer_prime.outer.device_copy import copy_off, has_side_streams, side_stream
from composer_prime.outer.fragments import Fragment


def flatten(params: Mapping[str, Tensor], fragment: Fragment) -> Tensor:
    """Copy a fragment's parameters into one vector.

    params  at least the fragment's names; any dtype and device, of the fragment's shapes.
    Returns fp32 [fragment.numel] on the CPU, in the fragment's order, sharing no memory with the parameters.
    Raises SiteError when a parameter is missing or has another shape.
    """
    flat = empty(fragment.numel)
    for parameter, start, stop in places(params, fragment):
        copy_to_host(parameter, flat[start:stop])
    return flat


def write_back(flat: Tensor, params: Mapping[str, Tensor], fragment: Fragment) -> Tensor:
    """Write a flat vector into a fragment's parameters, in place, keeping their dtype and device.

    flat  fp32 [fragment.numel] on the CPU.
    Returns fp32 [fragment.numel]: the values that the parameters now hold, that is `rounded(flat, params, fragment)`.
    Raises SiteError when a parameter is missing or has another shape.
    """
    held = empty(fragment.numel)
    with torch.no_grad():
        for parameter, start, stop in places(params, fragment):
            piece = flat[start:stop].to(parameter.dtype)  # rounded here, on the CPU: the same bits on every device
            parameter.copy_(piece.view(parameter.shape))
            held[start:stop].copy_(piece)
    return held


def rounded(flat: Tensor, params: Mapping[str, Tensor], fragment: Fragment) -> Tensor:
    """What `write_back` would return, without writing: each value rounded to its parameter's dtype, as fp32."""
    held = empty(fragment.numel)
    for parameter, start, stop in places(params, fragment):
        held[start:stop].copy_(flat[start:stop].to(parameter.dtype))
    return held


def pseudograd(base: Tensor, local: Tensor) -> Tensor:
    """base - local: the way a site moved since it adopted `base`, with the sign of a gradient. fp32 [n] each, CPU.

    Source: DiLoCo (arXiv:2311.08105), algorithm 1, line 11.
    """
    return torch.sub(base, local, out=empty(base.numel()))


def places(params: Mapping[str, Tensor], fragment: Fragment) -> Iterator[tuple[Tensor, int, int]]:
    """Each parameter of a fragment with the span of the flat vector that is its own.

    Raises SiteError when a parameter is missing or has another shape.
    """
    start = 0
    for name, shape in zip(fragment.names, fragment.shapes, strict=True):
        parameter = params.get(name)
        if parameter is None or tuple(parameter.shape) != shape:
            held = "is missing" if parameter is None else f"has shape {tuple(parameter.shape)}"
            raise SiteError(
                f"parameter {name} {held}, fragment {fragment.index} needs shape {shape}: "
                "pass the parameters from which the fragments were planned"
            )
        stop = start + math.prod(shape)
        yield parameter, start, stop
        start = stop


def copy_to_host(values: Tensor, target: Tensor) -> None:
    """Copy a whole tensor off its device; done when this returns, so the optimizer may overwrite `values` at once.

    values  any shape, float dtype and device.
    target  fp32 [values.numel()] on the CPU. Written, in the logical order of `values`.
    """
    with torch.no_grad():
        if has_side_streams(values.device):
            copy_off(values, target, side_stream(values.device))
        else:
            target.copy_(values.reshape(-1))
