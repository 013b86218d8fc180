"""A master as bytes: a fragment's global weights and outer momentum after v rounds, and the hash that names them.

Layout: all weights, then all momentum where the run has any, as little-endian fp32; no header, since the manifest
fixes the sizes. The hash is that of these bytes, so it names the value in commits and authenticates the snapshot alike.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.chunks import first_nonfinite

LITTLE_FP32 = np.dtype("<f4")


def pack_master(weights: Tensor, momentum: Tensor | None) -> bytes:
    """The bytes of a master. weights, momentum: fp32 [n], contiguous, CPU; None in a run without momentum."""
    return b"".join(_planes(weights, momentum))


def unpack_master(data: bytes | bytearray | memoryview, numel: int, *, momentum: bool) -> tuple[Tensor, Tensor | None]:
    """(weights, momentum), fp32 [numel] each, new memory, bit for bit what was packed.

    momentum   whether the master has any

    Raises CorruptObject when `data` has another size or holds a value that isn't finite.
    """
    size = (2 if momentum else 1) * LITTLE_FP32.itemsize * numel
    if len(data) != size:
        raise CorruptObject(
            f"a master of {numel} parameters has {size} bytes, this one has {len(data)}: "
            "fetch it again, or rebuild it from the log"
        )
    stored = np.frombuffer(data, dtype=LITTLE_FP32)
    cut = [stored[:numel], stored[numel:]] if momentum else [stored]
    planes = [torch.from_numpy(plane.astype(np.float32)) for plane in cut]
    for name, plane in zip(("weight", "momentum"), planes, strict=False):
        bad = first_nonfinite(plane)
        if bad is not None:
            raise CorruptObject(
                f"{name} {bad} of a master is {float(plane[bad])}, all must be finite: rebuild the master from the log"
            )
    return planes[0], planes[1] if momentum else None


def master_sha256(weights: Tensor, momentum: Tensor | None) -> str:
    """sha256 (hex) of `pack_master(weights, momentum)`, without making the copy."""
    digest = hashlib.sha256()
    for plane in _planes(weights, momentum):
        digest.update(plane)
    return digest.hexdigest()


def _planes(weights: Tensor, momentum: Tensor | None) -> list[memoryview]:
    planes = [weights] if momentum is None else [weights, momentum]
    return [values.detach().numpy().astype(LITTLE_FP32, copy=False).data for values in planes]
