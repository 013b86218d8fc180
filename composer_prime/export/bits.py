"""Weights as bits: masters rounded to the dtype in which they are served, and hashes of exactly those bits.

Bits, not values, since a record names exactly what a folder holds, -0.0 and the payload of every NaN included.
"""

import hashlib
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_prime.outer.chunks import spans

Bits: TypeAlias = NDArray[np.unsignedinteger]
"""1-D, uint16 or uint32: the bit patterns of a fragment's weights in its order."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SIGNED = {2: torch.int16, 4: torch.int32}
_UNSIGNED = {2: np.uint16, 4: np.uint32}


def rounded_bits(weights: Tensor, dtype: torch.dtype) -> Bits:
    """A master's fp32 weights rounded to `dtype` (to nearest, ties to even, as torch does it), as bits."""
    rounded = torch.empty(weights.numel(), dtype=dtype)
    for start, stop in spans(weights.numel()):
        rounded[start:stop] = weights[start:stop]
    return as_bits(rounded)


def as_bits(values: Tensor) -> Bits:
    """The bits of a 1-D contiguous CPU tensor, sharing its memory."""
    size = values.dtype.itemsize
    return values.detach().view(_SIGNED[size]).numpy().view(_UNSIGNED[size])


def as_values(bits: Bits, dtype: torch.dtype) -> Tensor:
    """The tensor that has these bits, sharing their memory."""
    return torch.from_numpy(bits.view(np.int16 if bits.itemsize == 2 else np.int32)).view(dtype)


def bits_sha256(bits: Bits) -> str:
    """sha256 (hex) of the bits as little-endian bytes."""
    return hashlib.sha256(bits.astype(bits.dtype.newbyteorder("<"), copy=False).data).hexdigest()
