"""fp32 and bf16: the values themselves, one after another, little endian.

fp32 is exact and the reference for tests; bf16 rounds to nearest, ties to even, and halves the bytes.
"""

import numpy as np
import torch
from torch import Tensor

from composer_prime.outer.chunks import empty, spans
from composer_prime.outer.codecs.base import FixedSize, check_decoded, check_encodable, check_size


class PlainCodec(FixedSize):
    """The values in a float dtype of torch's, whose bits are stored as integers of the same width."""

    sliceable = True
    block = 1

    def __init__(self, name: str, dtype: torch.dtype, bits: torch.dtype, stored: str) -> None:
        self.name, self.lossy = name, dtype != torch.float32
        self._dtype, self._bits, self._stored = dtype, bits, np.dtype(stored)

    def encode(self, x: Tensor) -> bytes:
        """See `Codec.encode`."""
        coded = np.empty(x.numel(), dtype=self._stored)
        for start, stop in spans(x.numel()):
            values = x[start:stop].to(self._dtype)
            check_encodable(self, x[start:stop], values, start)
            coded[start:stop] = values.view(self._bits).numpy()
        return coded.tobytes()

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> Tensor:
        """See `Codec.decode`."""
        check_size(self, data, numel)
        x, coded = empty(numel), np.frombuffer(data, dtype=self._stored)
        for start, stop in spans(numel):
            native = coded[start:stop].astype(self._stored.newbyteorder("="))
            x[start:stop].copy_(torch.from_numpy(native).view(self._dtype))
        check_decoded(self, x)
        return x

    def nbytes(self, numel: int) -> int:
        """See `Codec.nbytes`."""
        return self._stored.itemsize * numel


FP32 = PlainCodec("fp32", torch.float32, torch.int32, "<i4")
"""4 bytes a value, exact."""
BF16 = PlainCodec("bf16", torch.bfloat16, torch.int16, "<i2")
"""2 bytes a value, relative error at most 2**-8; a value that would round to infinity (over 3.39e38) is refused."""
