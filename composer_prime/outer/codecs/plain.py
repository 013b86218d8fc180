"""fp32 and bf16: the values themselves, one after another, little endian.

fp32 is exact and the reference for tests; bf16 rounds to nearest, ties to even, and halves the bytes.
"""

import numpy as np
import torch
from torch import Tensor

from composer_prime.outer.chunks import empty, spans
from composer_prime.outer.codecs.base import FixedSize, check_decoded, check_encodable, check_size

LITTLE_16 = np.dtype("<i2")
LITTLE_32 = np.dtype("<i4")


class Fp32Codec(FixedSize):
    """4 bytes a value, exact."""

    name = "fp32"
    lossy = False
    sliceable = True
    block = 1

    def encode(self, x: Tensor) -> bytes:
        """See `Codec.encode`."""
        check_encodable(self, x, x)
        return x.view(torch.int32).numpy().astype(LITTLE_32, copy=False).tobytes()

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> Tensor:
        """See `Codec.decode`."""
        check_size(self, data, numel)
        x = empty(numel)
        x.view(torch.int32).numpy()[:] = np.frombuffer(data, dtype=LITTLE_32)
        check_decoded(self, x)
        return x

    def nbytes(self, numel: int) -> int:
        """See `Codec.nbytes`."""
        return 4 * numel


class Bf16Codec(FixedSize):
    """2 bytes a value, relative error at most 2**-8; a value that would round to infinity (over 3.39e38) is refused."""

    name = "bf16"
    lossy = True
    sliceable = True
    block = 1

    def encode(self, x: Tensor) -> bytes:
        """See `Codec.encode`."""
        coded = np.empty(x.numel(), dtype=LITTLE_16)
        for start, stop in spans(x.numel()):
            short = x[start:stop].to(torch.bfloat16)
            check_encodable(self, x[start:stop], short, start)
            coded[start:stop] = short.view(torch.int16).numpy()
        return coded.tobytes()

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> Tensor:
        """See `Codec.decode`."""
        check_size(self, data, numel)
        x = empty(numel)
        coded = np.frombuffer(data, dtype=LITTLE_16)
        for start, stop in spans(numel):
            short = torch.from_numpy(coded[start:stop].astype(np.int16)).view(torch.bfloat16)
            x[start:stop].copy_(short)
        check_decoded(self, x)
        return x

    def nbytes(self, numel: int) -> int:
        """See `Codec.nbytes`."""
        return 2 * numel
