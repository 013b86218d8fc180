"""Candidates in about 50 bytes a token at k = 32, for a cache: ids without loss, probabilities to about 5e-4 nat of KL.

A block holds one sequence: a header, six sections of one zstd frame each, and a digest. A level in `BOOK` stands for a
probability. Even steps of sqrt(p) cost the same KL wherever they are; below them the book goes on in steps of 1 nat.
Frequent ids get small codes from a table in the block. The bits of a code go apart: their number, and then the bits.
"""

import hashlib
import struct
from typing import NamedTuple

import numpy as np
import zstandard

from composer_prime.config.distill import MAX_K
from composer_prime.errors import CorruptObject
from composer_prime.replay.score.candidates import EMPTY, Candidates
from composer_prime.replay.score.mixture import usable_rows

MAX_TOKENS = 1 << 18
"""Most tokens of a block. With `MAX_K` it bounds what decoding allocates: a result of 128 MiB, and int64 work."""

STEP = 0.0095
"""Of sqrt(p): k + 1 rounded square roots cost about (k + 1) * STEP^2 / 6 nats, 5e-4 at k = 32."""

LOWEST = -20.0
"""Nats; what is less likely is told as this."""

LEAST_COUNT = 3
"""Times that an id occurs before the table spends its bytes on it."""

MAX_ID = 2**31 - 1
_HEADER = struct.Struct("<4sBBII")
_MAGIC, _VERSION = b"CPSC", 1
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 8
_ID = np.dtype("<i4")


def _book() -> np.ndarray:
    roots = np.arange(1.0, 2 * STEP, -STEP)
    upper = 2 * np.log(roots)
    return np.concatenate([upper, np.arange(upper[-1] - 1, LOWEST, -1.0)])


BOOK = _book()
"""fp64, nats, falling from 0: the log-probability of each level; fewer than 256."""

_BETWEEN = -(BOOK[:-1] + BOOK[1:]) / 2


class _Shape(NamedTuple):
    """What a header says."""

    num_tokens: int
    k: int
    num_frequent: int


def encode(candidates: Candidates) -> bytes:
    """A block of n tokens' candidates; equal ones give equal bytes with the same zstd.

    Tokens that `usable_rows` refuses are coded as without a teacher, as a mixture would read them.
    Raises ValueError for more than `MAX_TOKENS` tokens, a k above `MAX_K`, or ids below 0.
    """
    num_tokens, k = candidates.ids.shape
    if num_tokens > MAX_TOKENS or not 1 <= k <= MAX_K:
        raise ValueError(f"({num_tokens}, {k}) candidates, at most ({MAX_TOKENS}, {MAX_K}): cut the sequence or k")
    if (candidates.ids < EMPTY).any():
        raise ValueError(f"an id is {candidates.ids.min()}, at least 0 is needed: {EMPTY} alone marks an empty slot")
    filled = (candidates.ids != EMPTY) & usable_rows(candidates)[:, None]
    logprobs = np.where(filled, candidates.logprobs, np.float32(-np.inf))
    counts = filled.sum(axis=1)

    codes, table = _codes(candidates.ids, filled)
    levels = np.searchsorted(_BETWEEN, -logprobs.astype(np.float64))
    order = np.argsort(np.where(filled, levels << 40 | codes, 1 << 62), axis=1)
    codes, levels = (np.take_along_axis(values, order, axis=1) for values in (codes, levels))
    filled = np.arange(k) < counts[:, None]
    tails = np.searchsorted(_BETWEEN, -Candidates(candidates.ids, logprobs).tail[counts > 0])

    in_order = codes.T[filled.T] + 1
    widths = _widths(in_order)
    sections = (
        counts.astype(np.uint8),
        np.diff(levels, axis=1, prepend=0).T[filled.T].astype(np.uint8),
        tails.astype(np.uint8),
        widths,
        _pack_bits(in_order, widths),
        table.astype(_ID).view(np.uint8).reshape(-1, _ID.itemsize).T,
    )
    packer = zstandard.ZstdCompressor(level=12)
    frames = [packer.compress(section.tobytes()) for section in sections]
    body = _HEADER.pack(_MAGIC, _VERSION, k, num_tokens, len(table))
    body += b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)
    return body + _digest(body)


def decode(block: bytes) -> Candidates:
    """What `encode` was given: the same ids at each token, and log-probabilities near theirs.

    Their probabilities and the tail's sum to 1. Tokens of one level stand in another order than before.
    Raises CorruptObject, and nothing else, for bytes that `encode` doesn't make. No length is believed before it is
    checked against `MAX_TOKENS` and `MAX_K`.
    """
    shape = _read_header(block)
    frames = _frames(block)
    counts = _section(frames[0], shape.num_tokens)
    if shape.num_tokens and counts.max() > shape.k:
        raise CorruptObject(f"a token has {counts.max()} candidates, at most {shape.k}: score the sequence again")
    filled = np.arange(shape.k) < counts[:, None]
    num_filled = int(counts.sum(dtype=np.int64))
    if shape.num_frequent > num_filled:
        raise CorruptObject(
            f"a table of {shape.num_frequent} ids for {num_filled} candidates: score the sequence again"
        )

    steps = np.zeros((shape.k, shape.num_tokens), np.int64)
    steps[filled.T] = _section(frames[1], num_filled)
    levels = np.cumsum(steps.T, axis=1)
    tails = _section(frames[2], int((counts > 0).sum()))
    if max(levels.max(initial=0), tails.max(initial=0)) >= len(BOOK):
        raise CorruptObject(f"a level is beyond the {len(BOOK)} of the book: score the sequence again")

    widths = _section(frames[3], num_filled)
    if num_filled and not 1 <= widths.min() <= widths.max() <= MAX_ID.bit_length() + 1:
        raise CorruptObject(f"codes of {widths.min()} to {widths.max()} bits: score the sequence again")
    num_bits = int(widths.sum(dtype=np.int64)) - num_filled
    codes = _unpack_bits(_section(frames[4], (num_bits + 7) // 8), widths) - 1
    planes = _section(frames[5], _ID.itemsize * shape.num_frequent).reshape(_ID.itemsize, -1)
    table = np.ascontiguousarray(planes.T).view(_ID).reshape(-1).astype(np.int64)
    is_frequent = codes < len(table)
    ids_in_order = codes - len(table)
    ids_in_order[is_frequent] = table[codes[is_frequent]]
    if num_filled and not 0 <= ids_in_order.min() <= ids_in_order.max() <= MAX_ID:
        raise CorruptObject(f"ids from {ids_in_order.min()} to {ids_in_order.max()}: score the sequence again")

    ids = np.full((shape.k, shape.num_tokens), EMPTY, np.int32)
    ids[filled.T] = ids_in_order
    return Candidates(np.ascontiguousarray(ids.T), _logprobs(levels, tails, filled))


def _logprobs(levels: np.ndarray, tails: np.ndarray, filled: np.ndarray) -> np.ndarray:
    """fp32 (n, k): the book's probabilities over their sum with the tail's."""
    told = np.where(filled, BOOK[levels], -np.inf)
    total = np.exp(told).sum(axis=1)
    total[filled[:, 0]] += np.exp(BOOK[tails])
    return (told - np.log(np.where(filled[:, 0], total, 1.0))[:, None]).astype(np.float32)


def _codes(ids: np.ndarray, filled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 (n, k), and int64 (table,): a frequent id's code is its place in the table, the others' follow it."""
    known, place, times = np.unique(ids[filled], return_inverse=True, return_counts=True)
    order = np.lexsort((known, -times))
    num_frequent = int((times >= LEAST_COUNT).sum())
    code = known.astype(np.int64) + num_frequent
    code[order[:num_frequent]] = np.arange(num_frequent)
    codes = np.zeros(ids.shape, np.int64)
    codes[filled] = code[place.reshape(-1)]
    return codes, known[order[:num_frequent]]


def _widths(values: np.ndarray) -> np.ndarray:
    """uint8: bits of each value, from 1."""
    return np.frexp(values.astype(np.float64))[1].astype(np.uint8)


def _pack_bits(values: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """uint8: the bits below each value's highest, the lowest bits of all values first."""
    planes = [(values[widths > bit + 1] >> bit & 1).astype(bool) for bit in range(widths.max(initial=1) - 1)]
    return np.packbits(np.concatenate([np.zeros(0, bool), *planes]))


def _unpack_bits(packed: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """int64: the values that `_pack_bits` packed."""
    values = np.int64(1) << (widths.astype(np.int64) - 1)
    bits, start = np.unpackbits(packed), 0
    for bit in range(widths.max(initial=1) - 1):
        longer = np.flatnonzero(widths > bit + 1)
        values[longer] |= bits[start : start + len(longer)].astype(np.int64) << bit
        start += len(longer)
    return values


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _read_header(block: bytes) -> _Shape:
    if len(block) < _HEADER.size + _DIGEST_BYTES or _digest(block[:-_DIGEST_BYTES]) != block[-_DIGEST_BYTES:]:
        raise CorruptObject(f"{len(block)} bytes of scores don't have their digest: score the sequence again")
    magic, version, k, num_tokens, num_frequent = _HEADER.unpack_from(block)
    if (magic, version) != (_MAGIC, _VERSION):
        raise CorruptObject(f"scores of kind {magic!r} {version}, not {_MAGIC!r} {_VERSION}: score the sequence again")
    if num_tokens > MAX_TOKENS or not 1 <= k <= MAX_K:
        raise CorruptObject(
            f"({num_tokens}, {k}) candidates, at most ({MAX_TOKENS}, {MAX_K}): score the sequence again"
        )
    return _Shape(num_tokens, k, num_frequent)


def _frames(block: bytes) -> list[bytes]:
    """The six frames between header and digest."""
    frames, start, end = [], _HEADER.size, len(block) - _DIGEST_BYTES
    while start < end and len(frames) < 6:
        length = _LENGTH.unpack_from(block, start)[0] if start + _LENGTH.size <= end else end
        start += _LENGTH.size
        if start + length > end:
            raise CorruptObject(f"a section of {length} bytes where {end - start} are left: score the sequence again")
        frames.append(block[start : start + length])
        start += length
    if len(frames) != 6 or start != end:
        raise CorruptObject(f"{len(frames)} sections and {end - start} bytes, not 6 and 0: score the sequence again")
    return frames


def _section(frame: bytes, size: int) -> np.ndarray:
    """uint8 (size,) of one frame, whose own length is read before anything is decompressed."""
    try:
        stated = zstandard.frame_content_size(frame)
        if stated != size:
            raise CorruptObject(f"a section of {size} bytes is needed, its frame says {stated}: score it again")
        plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"a section can't be decompressed ({error}): score the sequence again") from error
    return np.frombuffer(plain, np.uint8)
