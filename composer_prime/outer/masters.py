"""A master as bytes: a fragment's global weights and outer momentum after v rounds, and the hash that names them.

Layout: all weights, then all momentum, as little-endian fp32; no header, since the manifest fixes the sizes. The hash
is that of these bytes, so it names the value in commits and authenticates the snapshot object alike.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.chunks import first_nonfinite

LITTLE_FP32 = np.dtype("<f4")


def pack_master(weights: Tensor, momentum: Tensor) -> bytes:
    """The 8 n bytes of a master. weights, momentum: fp32 [n], contiguous, CPU."""
    return b"".join(_planes(weights, momentum))


def unpack_master(data: bytes | bytearray | memoryview, numel: int) -> tuple[Tensor, Tensor]:
    """(weights, momentum), fp32 [numel] each, new memory, bit for bit what was packed.

    Raises CorruptObject when `data` isn't 8 * numel bytes or holds a value that isn't finite.
    """
    if len(data) != 8 * numel:
        raise CorruptObject(
            f"a master of {numel} parameters has {8 * numel} bytes, this one has {len(data)}: "
            "fetch it again, or rebuild it from the log"
        )
    stored = np.frombuffer(data, dtype=LITTLE_FP32)
    weights, momentum = (torch.from_numpy(plane.astype(np.float32)) for plane in (stored[:numel], stored[numel:]))
    for name, plane in (("weight", weights), ("momentum", momentum)):
        bad = first_nonfinite(plane)
        if bad is not None:
            raise CorruptObject(
                f"{name} {bad} of a master is {float(plane[bad])}, all must be finite: rebuild the master from the log"
            )
    return weights, momentum


def master_sha256(weights: Tensor, momentum: Tensor) -> str:
    """sha256 (hex) of `pack_master(weights, momentum)`, without making the copy."""
    digest = hashlib.sha256()
    for plane in _planes(weights, momentum):
        digest.update(plane)
    return digest.hexdigest()


def _planes(weights: Tensor, momentum: Tensor) -> list[memoryview]:
    return [values.detach().numpy().astype(LITTLE_FP32, copy=False).data for values in (weights, momentum)]
