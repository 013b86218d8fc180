"""Top-k: the 64 largest of every 4096 values, 2 bits each, and their positions entropy-coded: 207 times smaller.

Layout: 3 bytes a block for its two magnitudes, then for all kept values in order 2 bits of (sign, magnitude), 5 low
bits of the gap, and the unary rest of the gap (see rice.py). Everything else is zero; error feedback must keep it.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.codecs import rice
from composer_prime.outer.codecs.base import check_encodable, check_size
from composer_prime.outer.sparse import Sparse

BLOCK = 4096
KEPT = 64
SPAN_BLOCKS = 64
"""Blocks selected at a time: 1 MiB of values. With 8 encoding took 1.7 times as long, with 256 no less."""

MAGNITUDE = 0x7FFFFFFF
INFINITE = 0x7F800000
CUT_BITS = 19
"""Low bits of fp32 that a magnitude loses: 8 of exponent and 4 of significand stay, 12 in all."""

LARGEST_CODE = (INFINITE >> CUT_BITS) - 1
TINY = 1 << CUT_BITS
"""Bits of 2**-130, the least magnitude that has a code; smaller values count as zeros."""

VALUE_BITS = 2
SIGN, HIGH = 1, 2
LEVEL_BYTES = 3


class _Part(NamedTuple):
    """Blocks of one length: `rows` of `length` values each from index `start`, of which `kept` are kept in each."""

    start: int
    rows: int
    length: int
    kept: int


class TopkCodec:
    """64 of 4096 values, of a short last block of m values ceil(m / 64); of equal ones those that come first.

    Kept values take one of two magnitudes of their block: the means of the larger and of the smaller ones, split where
    the squared error is least (2-means in one dimension), each rounded to 5 significant bits. In a block with too few
    nonzero values the first zeros fill up, the lower magnitude is 0 and the upper one the mean of the nonzero values.
    Sums are fp64 in a fixed order. decode accepts exactly one payload for each vector that it can return.

    Source: SparseLoCo (arXiv:2508.15706), top-k in chunks of 4096 with 2-bit values and error feedback; the magnitudes
    and the positions' code are ours.
    """

    name = "topk"
    lossy = True
    sliceable = False
    block = 4096

    def encode(self, x: Tensor) -> bytes:
        """See `Codec.encode`. Every finite vector can be coded."""
        levels, values, gaps = [], [], []
        for part in _parts(x.numel()):
            for first in range(0, part.rows, SPAN_BLOCKS):
                start = part.start + first * part.length
                stop = start + min(SPAN_BLOCKS, part.rows - first) * part.length
                rows = x[start:stop].numpy().view(np.int32).reshape(-1, part.length)
                magnitudes = rows & MAGNITUDE
                if magnitudes.max() >= INFINITE:
                    check_encodable(self, x[start:stop], x[start:stop], start)
                positions, largest = _select(magnitudes, part.kept)
                kept = np.take_along_axis(rows, positions, axis=1)
                level, value = _quantize(kept, largest)
                levels.append(level)
                values.append(value.reshape(-1))
                gaps.append((np.diff(positions, axis=1, prepend=-1) - 1).astype(np.uint16).reshape(-1))
        if not levels:
            return b""
        all_gaps = np.concatenate(gaps)
        return b"".join(
            (
                _pack_levels(np.concatenate(levels)),
                rice.pack(np.concatenate(values), VALUE_BITS),
                rice.pack(all_gaps % rice.STEP, rice.LOW_BITS),
                rice.pack_unary(all_gaps >> rice.LOW_BITS),
            )
        )

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> Tensor:
        """See `Codec.decode`."""
        return self.decode_sparse(data, numel).dense()

    def decode_sparse(self, data: bytes | bytearray | memoryview, numel: int) -> Sparse:
        """See `SparseCodec.decode_sparse`."""
        check_size(self, data, numel)
        parts, places, kept_values = _parts(numel), [], []
        coded, kept = np.frombuffer(data, np.uint8), sum(part.rows * part.kept for part in parts)
        sections = np.cumsum([LEVEL_BYTES * sum(part.rows for part in parts), *_packed_sizes(kept)])
        levels, values, lows, rests = np.split(coded, sections)
        levels, values = _unpack_levels(levels), rice.unpack(values, kept, VALUE_BITS)
        gaps = rice.unpack(lows, kept, rice.LOW_BITS) + rice.STEP * rice.unpack_unary(rests, kept)
        for part in parts:
            count = part.rows * part.kept
            positions = np.cumsum(gaps[:count].reshape(part.rows, part.kept) + 1, axis=1) - 1
            value = values[:count].reshape(part.rows, part.kept)
            _check_part(part, levels[: part.rows], value, positions)
            high = (value & HIGH).astype(bool)
            bits = np.where(high, levels[: part.rows, 1:], levels[: part.rows, :1]).astype(np.uint32) << CUT_BITS
            bits |= (value & SIGN).astype(np.uint32) << 31
            positions += part.start + part.length * np.arange(part.rows)[:, None]
            places.append(positions.reshape(-1))
            kept_values.append(bits.view(np.float32).reshape(-1))
            levels, values, gaps = levels[part.rows :], values[count:], gaps[count:]
        if not parts:
            return Sparse(0, np.zeros(0, np.int64), np.zeros(0, np.float32))
        return Sparse(numel, np.concatenate(places), np.concatenate(kept_values))

    def size_bounds(self, numel: int) -> tuple[int, int]:
        """See `Codec.size_bounds`: all kept values at the start of their blocks, and as far behind as can be."""
        bounds = [(part.rows, rice.unary_bounds(part.length, part.kept)) for part in _parts(numel)]
        fixed = _fixed_size(numel)
        least, most = (sum(rows * bits[which] for rows, bits in bounds) for which in (0, 1))
        return fixed + -(-least // 8), fixed + -(-most // 8)

    def nbytes(self, numel: int) -> int:
        """See `Codec.nbytes`: the mean over all choices of positions."""
        bits = sum(part.rows * rice.expected_unary_bits(part.length, part.kept) for part in _parts(numel))
        return _fixed_size(numel) + int(-(-bits // 8))


def _parts(numel: int) -> list[_Part]:
    """The whole blocks of a vector, then the short last one; at most two parts, none without values."""
    rows, rest = divmod(numel, BLOCK)
    parts = [_Part(0, rows, BLOCK, KEPT), _Part(rows * BLOCK, 1, rest, -(-KEPT * rest // BLOCK))]
    return [part for part in parts if part.rows * part.length]


def _packed_sizes(kept: int) -> tuple[int, int]:
    """Bytes of the values and of the gaps' low bits."""
    return rice.num_packed_bytes(kept, VALUE_BITS), rice.num_packed_bytes(kept, rice.LOW_BITS)


def _fixed_size(numel: int) -> int:
    parts = _parts(numel)
    kept = sum(part.rows * part.kept for part in parts)
    return LEVEL_BYTES * sum(part.rows for part in parts) + sum(_packed_sizes(kept))


def _select(magnitudes: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray]:
    """Rising positions, int64 [rows, kept], of each row's largest, and these magnitudes' bits from the largest down.

    magnitudes      int32 [rows, length]: bits of |x|, whose order is that of the values.
    """
    rows, length = magnitudes.shape
    largest = np.partition(magnitudes, length - kept, axis=1)[:, length - kept :]
    largest = np.sort(largest, axis=1)[:, ::-1]
    least = largest[:, -1:]
    if ((least > 0) & (least < TINY)).any():
        return _select(np.where(magnitudes < TINY, 0, magnitudes), kept)
    chosen = magnitudes >= least
    positions = np.flatnonzero(chosen)
    if positions.size > rows * kept:  # equal values at the edge: the first ones are kept
        above, equal = magnitudes > least, magnitudes == least
        room = kept - np.count_nonzero(above, axis=1)
        chosen = above | (equal & (np.cumsum(equal, axis=1, dtype=np.int32) <= room[:, None]))
        positions = np.flatnonzero(chosen)
    return positions.reshape(rows, kept) % length, largest


def _quantize(kept: np.ndarray, largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the two magnitudes, int64 [rows, 2] from low to high, and of the values, uint8 [rows, kept].

    kept        int32 [rows, kept]: bits of the kept values in order.
    largest     int32 [rows, kept]: bits of their magnitudes, from the largest down.
    """
    size = largest.shape[1]
    sizes = np.arange(1, size + 1)
    sorted_values = np.ascontiguousarray(largest).view(np.float32).astype(np.float64)
    upper = np.cumsum(sorted_values, axis=1)  # of the first 1, 2, ...: one after another, so the order is fixed
    lower = np.zeros_like(upper)
    lower[:, :-1] = np.cumsum(sorted_values[:, :0:-1], axis=1)[:, ::-1]
    others = np.maximum(size - sizes, 1)
    split = np.argmax(upper * upper / sizes + lower * lower / others, axis=1)  # most between = least within
    nonzero = np.count_nonzero(largest, axis=1)
    split = np.where(nonzero < size, np.maximum(nonzero - 1, 0), split)[:, None]
    high_code = _level_code(np.take_along_axis(upper / sizes, split, axis=1))
    low_code = _level_code(np.take_along_axis(lower / others, split, axis=1))
    high = (kept & MAGNITUDE) >= np.take_along_axis(largest, split, axis=1)
    one = high.all(axis=1, keepdims=True) | (low_code == high_code)
    low_code = np.where(one, high_code, low_code)
    high &= ~one
    zero = np.where(high, high_code, low_code) == 0
    signs = (kept < 0) & ~zero
    return np.concatenate([low_code, high_code], axis=1), (SIGN * signs + HIGH * high).astype(np.uint8)


def _level_code(magnitudes: np.ndarray) -> np.ndarray:
    """12-bit codes of magnitudes, fp64: fp32 rounded half to even to 4 bits of significand, at most 1.9375 * 2**127."""
    bits = magnitudes.astype(np.float32).view(np.int32).astype(np.int64)
    odd = bits >> CUT_BITS & 1
    return np.minimum((bits + (1 << CUT_BITS - 1) - 1 + odd) >> CUT_BITS, LARGEST_CODE)


def _pack_levels(levels: np.ndarray) -> bytes:
    """3 bytes a block, little endian: the low magnitude's 12 bits, then the high one's."""
    both = (levels[:, 0] | levels[:, 1] << 12).astype("<u4")
    return both.view(np.uint8).reshape(-1, 4)[:, :LEVEL_BYTES].tobytes()


def _unpack_levels(data: np.ndarray) -> np.ndarray:
    """int64 [blocks, 2]: see `_pack_levels`. Raises CorruptObject when they aren't finite or not in order."""
    low, middle, high = data.reshape(-1, LEVEL_BYTES).astype(np.int64).T
    levels = np.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], axis=1)
    wrong = (levels[:, 0] > levels[:, 1]) | (levels[:, 1] > LARGEST_CODE)
    if wrong.any():
        block = int(np.argmax(wrong))
        raise CorruptObject(
            f"magnitudes {levels[block].tolist()} of block {block} of a topk payload must rise and be at most "
            f"{LARGEST_CODE}: refuse the offer that names it"
        )
    return levels


def _check_part(part: _Part, levels: np.ndarray, values: np.ndarray, positions: np.ndarray) -> None:
    """Raise CorruptObject unless `encode` writes these, all [rows, ...]; zeros have one form only."""
    ranks = np.arange(part.kept)
    high = (values & HIGH).astype(bool)
    num_high = np.count_nonzero(high, axis=1)
    one = levels[:, 0] == levels[:, 1]
    zero = ~high & (levels[:, :1] == 0)
    last_zero = np.where(zero, positions, -1).max(axis=1, initial=-1)
    rank_of_last = np.where(zero, ranks, -1).max(axis=1, initial=-1)
    faults = {
        "has positions behind its end": positions[:, -1] >= part.length,
        "must use one magnitude if both are equal, else both": np.where(
            one, num_high > 0, (num_high == 0) | (num_high == part.kept)
        ),
        "has zeros with a sign": (zero & ((values & SIGN) > 0)).any(axis=1),
        "must fill up with the first zeros": last_zero != rank_of_last,
    }
    for fault, wrong in faults.items():
        if wrong.any():
            block = part.start // BLOCK + int(np.argmax(wrong))
            raise CorruptObject(f"block {block} of a topk payload {fault}: refuse the offer that names it")
