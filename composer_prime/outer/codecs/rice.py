"""Rising positions as bits: each gap's low 5 bits as they are, the rest of it in unary (Rice's code, k = 5).

The low bits and the unary parts are two streams, so both are coded and read without a loop over the gaps. For 64
random places of 4096 a gap takes 7.53 bits; log2 C(4096, 64) / 64 = 7.36 is the least. Bits go from low to high.
"""

import math
from fractions import Fraction
from functools import cache

import numpy as np

from composer_prime.errors import CorruptObject

LOW_BITS = 5
STEP = 1 << LOW_BITS
LITTLE_64 = np.dtype("<u8")


def num_packed_bytes(count: int, width: int) -> int:
    """Bytes that `count` numbers of `width` bits take."""
    return -(-count * width // 8)


def pack(numbers: np.ndarray, width: int) -> bytes:
    """Numbers, any integer dtype [n], each under 2**width with width up to 8, one after another without a gap."""
    groups = np.zeros((-(-numbers.size // 8), 8), dtype=LITTLE_64)  # 8 numbers are `width` bytes
    groups.reshape(-1)[: numbers.size] = numbers
    groups <<= np.arange(0, 8 * width, width, dtype=np.uint64)
    words = np.bitwise_or.reduce(groups, axis=1).astype(LITTLE_64, copy=False)
    packed = words.view(np.uint8).reshape(-1, 8)[:, :width]
    return packed.tobytes()[: num_packed_bytes(numbers.size, width)]


def unpack(data: np.ndarray, count: int, width: int) -> np.ndarray:
    """The uint8 [count] that `pack` wrote as `data`, uint8. Raises CorruptObject when bits behind the last aren't 0."""
    padded = np.zeros((-(-count // 8), width), dtype=np.uint8)
    padded.reshape(-1)[: data.size] = data
    words = np.zeros((len(padded), 8), dtype=np.uint8)
    words[:, :width] = padded
    shifts = np.arange(0, 8 * width, width, dtype=np.uint64)
    numbers = (words.view(LITTLE_64) >> shifts & ((1 << width) - 1)).astype(np.uint8).reshape(-1)
    if numbers[count:].any() or (count and data[-1] >> ((count * width - 1) % 8 + 1)):
        raise CorruptObject(
            f"bits behind {count} numbers of {width} bits must be 0: refuse the offer that names this payload"
        )
    return numbers[:count]


def pack_unary(numbers: np.ndarray) -> bytes:
    """Numbers, integers [n], each as that many 0 bits and a 1."""
    ends = np.cumsum(numbers.astype(np.int64) + 1)
    bits = np.zeros(int(ends[-1]) if ends.size else 0, dtype=np.uint8)
    bits[ends - 1] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_unary(data: np.ndarray, count: int) -> np.ndarray:
    """The int64 [count] that `pack_unary` wrote as `data`, uint8; memory is 16 bytes a byte of data and 8 a number.

    Raises CorruptObject when there are more or fewer numbers than `count`, or bytes behind the last one.
    """
    ends = np.flatnonzero(np.unpackbits(data, bitorder="little"))
    used = 0 if not ends.size else int(ends[-1]) // 8 + 1
    if ends.size != count or used != data.size:
        raise CorruptObject(
            f"{data.size} bytes of gaps hold {ends.size} gaps in {used} bytes, they must hold {count} in all of them: "
            "refuse the offer that names this payload"
        )
    return np.diff(ends, prepend=-1) - 1


def unary_bounds(length: int, kept: int) -> tuple[int, int]:
    """Least and most bits of the unary parts of `kept` positions below `length`."""
    return kept, kept + (length - kept) // STEP


@cache
def expected_unary_bits(length: int, kept: int) -> Fraction:
    """Expected bits of the unary parts of `kept` positions below `length` when every choice is equally likely.

    Each gap is at least g with probability C(length - g, kept) / C(length, kept), and its unary part is 1 bit and one
    for each multiple of 32 that it reaches.
    """
    reached = sum(math.comb(length - gap, kept) for gap in range(STEP, length - kept + 1, STEP))
    return kept * (1 + Fraction(reached, math.comb(length, kept)))
