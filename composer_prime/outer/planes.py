"""fp32 vectors without loss in fewer bytes: the four bytes of the values apart, each such plane coded where that pays.

Weights of one layer share a few exponents, so their highest bytes take a third; what came from bf16 has two planes of
zeros; low bytes of a trained mantissa are noise and stay as they are. Blocks bound the memory, and stay near the core.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import zstandard
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.chunks import empty
from composer_prime.outer.master_header import BLOCK, VALUE_BYTES

LITTLE_FP32 = np.dtype("<f4")
Piece = bytes | memoryview
PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=10)
"""Entropy coding is all that helps. Level 1 as it comes finds short matches by chance, which cost more than they save
(0.369 of a byte for the highest plane of Gaussian weights, so 0.346, an order-0 model 0.335), and 3 is worse."""


def encode_planes(x: Tensor) -> Iterator[bytes]:
    """The planes of x, fp32 [n], contiguous, CPU: for each block four, from the lowest byte to the highest.

    A piece as long as its block is that plane itself; a shorter one is a zstd frame of it. The same library makes the
    same bytes of the same values; another release may not, and every one decodes them.
    """
    coder = zstandard.ZstdCompressor(compression_params=PARAMETERS)
    values = x.detach().numpy().astype(LITTLE_FP32, copy=False).view(np.uint8).reshape(-1, VALUE_BYTES)
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        for place in range(VALUE_BYTES):
            plane = block[:, place].tobytes()
            coded = coder.compress(plane)
            yield coded if len(coded) < len(plane) else plane


def decode_planes(pieces: Iterable[Piece], numel: int) -> Tensor:
    """fp32 [numel], new memory, from the pieces that `encode_planes` gave, bit for bit.

    Raises CorruptObject when a piece isn't one of a plane of its block; no more than the vector is ever allocated.
    """
    x = empty(numel)
    decoder = zstandard.ZstdDecompressor()
    values = x.numpy().view(np.uint8).reshape(-1, VALUE_BYTES)
    if not LITTLE_FP32.isnative:
        values = values[:, ::-1]
    for number, piece in enumerate(pieces):
        block, index = divmod(number, VALUE_BYTES)
        rows = values[block * BLOCK : (block + 1) * BLOCK]
        rows[:, index] = np.frombuffer(_plane(decoder, piece, len(rows)), np.uint8)
    return x


def _plane(decoder: zstandard.ZstdDecompressor, piece: Piece, size: int) -> Piece:
    if len(piece) == size:
        return piece
    try:
        stated = zstandard.frame_content_size(piece)
        if stated != size:  # told before anything is decompressed: a frame may say any length
            raise CorruptObject(f"a plane of {size} bytes was expected, its frame says {stated}: rebuild the master")
        return decoder.decompress(piece, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"a plane of {size} bytes can't be decompressed ({error}): fetch it again") from error
