"""A master as bytes: a fragment's global weights and outer momentum after v rounds, and the hash that names them.

The hash is that of all weights, then all momentum where the run has any, as little-endian fp32: it names the value,
however it is stored. Stored, the same values take fewer bytes: a header, a table of sizes, and of each vector, block by
block, the four bytes of its values apart, each such plane coded where that pays: weights of one layer share a few
exponents, so their highest bytes take a third; what came from bf16 has two planes of zeros; low bytes are noise.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import zstandard
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.chunks import empty, first_nonfinite
from composer_prime.outer.master_header import (
    BLOCK,
    HEADER_BYTES,
    SIZE_BYTES,
    VALUE_BYTES,
    num_blocks,
    num_vectors,
    read_header,
    table_bytes,
    write_header,
)

_SIZE = np.dtype(f"<u{SIZE_BYTES}")
LITTLE_FP32 = np.dtype("<f4")
Piece = bytes | memoryview
PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=10)
"""Entropy coding is all that helps. Level 1 as it comes finds short matches by chance, which cost more than they save
(0.369 of a byte for the highest plane of Gaussian weights, so 0.346, an order-0 model 0.335), and 3 is worse."""


def plain_bytes(weights: Tensor, momentum: Tensor | None) -> list[memoryview]:
    """What is hashed: little-endian fp32. weights, momentum: fp32 [n], contiguous, CPU; None without momentum."""
    vectors = [weights] if momentum is None else [weights, momentum]
    return [values.detach().numpy().astype(LITTLE_FP32, copy=False).data for values in vectors]


def master_sha256(weights: Tensor, momentum: Tensor | None) -> str:
    """sha256 (hex) of `plain_bytes`: the name of a master, however it is stored."""
    digest = hashlib.sha256()
    for values in plain_bytes(weights, momentum):
        digest.update(values)
    return digest.hexdigest()


def pack_master(weights: Tensor, momentum: Tensor | None) -> bytes:
    """A master as it is stored. weights, momentum: as for `plain_bytes`."""
    vectors = [weights] if momentum is None else [weights, momentum]
    pieces = [piece for values in vectors for piece in _encode_planes(values)]
    sizes = np.array([len(piece) for piece in pieces], _SIZE).tobytes()
    nbytes = HEADER_BYTES + len(sizes) + sum(map(len, pieces))
    return b"".join((write_header(weights.numel(), nbytes, momentum=momentum is not None), sizes, *pieces))


def unpack_master(data: bytes | bytearray | memoryview, numel: int, *, momentum: bool) -> tuple[Tensor, Tensor | None]:
    """(weights, momentum), fp32 [numel] each, new memory, bit for bit what was packed.

    momentum   whether the master has any

    Raises CorruptObject when `data` is no such master, has another size than it says, or holds a value that isn't
    finite. Sizes are checked against `numel` before anything is decompressed.
    """
    stated = read_header(data, numel, momentum=momentum)
    if len(data) != stated:
        raise CorruptObject(f"a stored master says {stated} bytes and has {len(data)}: fetch it again")
    pieces, each = _cut(memoryview(data), numel, momentum), VALUE_BYTES * num_blocks(numel)
    vectors = [
        _decode_planes(pieces[at * each : (at + 1) * each], numel) for at in range(num_vectors(momentum=momentum))
    ]
    _refuse_nonfinite(vectors)
    return vectors[0], vectors[1] if momentum else None


def _refuse_nonfinite(vectors: Sequence[Tensor]) -> None:
    """Raise CorruptObject when a value of a master isn't finite. vectors: weights, and momentum if it has any."""
    for name, values in zip(("weight", "momentum"), vectors, strict=False):
        bad = first_nonfinite(values)
        if bad is not None:
            raise CorruptObject(
                f"{name} {bad} of a master is {float(values[bad])}, all must be finite: rebuild the master from the log"
            )


def _cut(data: memoryview, numel: int, momentum: bool) -> Sequence[memoryview]:
    """The pieces of a whole master by its table of sizes. Raises CorruptObject when they don't fill it exactly."""
    start = HEADER_BYTES + table_bytes(numel, momentum=momentum)
    ends = list(accumulate(np.frombuffer(data[HEADER_BYTES:start], _SIZE).tolist(), initial=start))
    if ends[-1] != len(data):
        raise CorruptObject(f"the planes of a stored master end at byte {ends[-1]} of {len(data)}: fetch it again")
    return [data[first:last] for first, last in pairwise(ends)]


def _encode_planes(x: Tensor) -> Iterator[bytes]:
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


def _decode_planes(pieces: Iterable[Piece], numel: int) -> Tensor:
    """fp32 [numel], new memory, from the pieces that `_encode_planes` gave, bit for bit.

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
