"""What changed between two sets of weights, losslessly: where, and by how many steps of the dtype, zstd-coded.

A round moves most weights by less than half a step of bf16, which rounding swallows, and the rest by a step or two. So
the changed places are sent as gaps and the changes as small numbers, in planes of bytes that compress well.

Layout, before zstd: for each block of BLOCK elements a little-endian uint32 count of changed elements, then the gaps
between them (position in the block minus the one before, minus one) as 3 planes of bytes, lowest first, then the
zigzag-coded differences of the bit patterns, modulo the width, as 2 or 4 planes.
"""

from io import BytesIO

import numpy as np
import zstandard

from composer_prime.errors import CorruptObject
from composer_prime.export.bits import Bits

BLOCK = 2**20
LEVEL = 9
_GAP_BYTES = 3
_COUNT = np.dtype("<u4")


def encode_delta(old: Bits, new: Bits) -> bytes:
    """Bytes from which `apply_delta` makes `new` out of `old`; both 1-D, of one length and one unsigned dtype."""
    assert old.dtype == new.dtype and old.shape == new.shape
    coder = zstandard.ZstdCompressor(level=LEVEL).compressobj()
    pieces = []
    for start in range(0, old.size, BLOCK):
        before, after = old[start : start + BLOCK], new[start : start + BLOCK]
        places = np.flatnonzero(before != after)
        gaps = np.diff(places, prepend=-1) - 1
        changes = _zigzag(after[places] - before[places])
        pieces.append(coder.compress(np.array([places.size], _COUNT).tobytes()))
        pieces.append(coder.compress(_planes(gaps.astype(np.uint32), _GAP_BYTES)))
        pieces.append(coder.compress(_planes(changes, changes.itemsize)))
    pieces.append(coder.flush())
    return b"".join(pieces)


def apply_delta(old: Bits, delta: bytes) -> Bits:
    """`new`, in new memory. Raises CorruptObject when these bytes are no delta of so many elements.

    Whether it is the delta of this very `old` only the hash of what comes out tells.
    """
    new = old.copy()
    with zstandard.ZstdDecompressor().stream_reader(BytesIO(delta)) as stream:
        for start in range(0, old.size, BLOCK):
            block = new[start : start + BLOCK]
            count = int(np.frombuffer(_read(stream, _COUNT.itemsize), _COUNT)[0])
            if count > block.size:
                raise CorruptObject(f"a delta changes {count} of {block.size} weights: fetch it again")
            gaps = _unplaned(_read(stream, _GAP_BYTES * count), _GAP_BYTES, count)
            places = np.cumsum(gaps.astype(np.int64) + 1) - 1
            if count and places[-1] >= block.size:
                raise CorruptObject(f"a delta changes weight {places[-1]} of {block.size}: fetch it again")
            changes = _unplaned(_read(stream, old.itemsize * count), old.itemsize, count).astype(old.dtype)
            block[places] += _unzigzag(changes)
        if _rest(stream):
            raise CorruptObject(f"a delta goes on behind its {old.size} weights: fetch it again")
    return new


def num_changed(old: Bits, new: Bits) -> int:
    """How many elements differ in any bit."""
    return sum(
        int(np.count_nonzero(old[start : start + BLOCK] != new[start : start + BLOCK]))
        for start in range(0, old.size, BLOCK)
    )


def _zigzag(difference: Bits) -> Bits:
    """Differences modulo the width as small numbers: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    top = difference.dtype.itemsize * 8 - 1
    negative = (difference >> difference.dtype.type(top)).astype(difference.dtype)
    return (difference << difference.dtype.type(1)) ^ (np.zeros_like(difference) - negative)


def _unzigzag(coded: Bits) -> Bits:
    one = coded.dtype.type(1)
    return (coded >> one) ^ (np.zeros_like(coded) - (coded & one))


def _planes(values: Bits, width: int) -> bytes:
    """The lowest `width` bytes of each value: all lowest bytes first, then all second ones, and so on."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return little.view(np.uint8).reshape(-1, values.itemsize).T[:width].tobytes()


def _unplaned(data: bytes, width: int, count: int) -> Bits:
    """uint32 [count] from its planes."""
    values = np.zeros(count, np.uint32)
    for number, plane in enumerate(np.frombuffer(data, np.uint8).reshape(width, count)):
        values |= plane.astype(np.uint32) << np.uint32(8 * number)
    return values


def _read(stream: zstandard.ZstdDecompressionReader, nbytes: int) -> bytes:
    try:
        data = stream.read(nbytes) if nbytes else b""
        while len(data) < nbytes and (more := stream.read(nbytes - len(data))):
            data += more
    except zstandard.ZstdError as error:
        raise CorruptObject(f"a delta can't be decompressed ({error}): fetch it again") from error
    if len(data) < nbytes:
        raise CorruptObject(f"a delta ends {nbytes - len(data)} bytes too early: fetch it again")
    return data


def _rest(stream: zstandard.ZstdDecompressionReader) -> bytes:
    try:
        return stream.read(1)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"a delta can't be decompressed ({error}): fetch it again") from error
