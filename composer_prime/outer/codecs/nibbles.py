"""Codes of 4 bits, two a byte, in blocks of 64 with a scale each: what int4 and e3m0 share.

Value 2i of a vector is the low half of byte i and value 2i + 1 the high half; an odd vector ends with a half of zeros.
Vectors are walked in short spans of whole blocks, so that the dozen passes over a span stay in the core's cache.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.chunks import empty

BLOCK = 64
SPAN = 2**17
"""Elements in a span. On 25 M values 16 Ki took twice as long, 128 Ki to 1 Mi didn't differ by more than the noise."""

PAIR = np.dtype("<u2")


def num_blocks(numel: int) -> int:
    """Blocks that `numel` values fill, the last one perhaps in part."""
    return -(-numel // BLOCK)


def num_packed_bytes(numel: int) -> int:
    """Bytes of `numel` codes."""
    return -(-numel // 2)


def block_spans(numel: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of spans of whole blocks that cover `range(numel)`; a short last block is one by itself."""
    whole = numel // BLOCK * BLOCK
    for start in range(0, whole, SPAN):
        yield start, min(start + SPAN, whole)
    if whole < numel:
        yield whole, numel


def as_blocks(span: Tensor) -> Tensor:
    """A span, fp32 [n], as rows of one block, fp32 [blocks, 64]: a view, or for a short block a copy with zeros."""
    if span.numel() % BLOCK:
        padded = torch.zeros(BLOCK, dtype=torch.float32)
        padded[: span.numel()] = span
        span = padded
    return span.view(-1, BLOCK)


def pack(codes: Tensor, packed: np.ndarray) -> None:
    """Write codes, int8 [blocks, 64] of which the low 4 bits count, to `packed`, uint8 [up to 32 * blocks]."""
    pairs = codes.numpy().reshape(-1).view(PAIR)
    halves = (pairs & 0x0F) | (pairs >> 4 & 0xF0)
    packed[:] = halves[: packed.size]


def make_table(levels: list[float]) -> np.ndarray:
    """What each byte stands for, fp32 [256, 2], given the 16 values of a code."""
    values, codes = np.array(levels, dtype=np.float32), np.arange(256)
    return np.stack([values[codes & 15], values[codes >> 4]], axis=1)


def decode_blocks(packed: np.ndarray, scales: Tensor, table: np.ndarray, numel: int) -> Tensor:
    """fp32 [numel]: what each code stands for, times its block's scale.

    packed      uint8 [ceil(numel / 2)]
    scales      fp32 [blocks]
    table       from `make_table`
    """
    x = empty(numel)
    for start, stop in block_spans(numel):
        scale = scales[start // BLOCK : num_blocks(stop)].view(-1, 1)
        rows = x[start:stop].view(-1, BLOCK) if (stop - start) % BLOCK == 0 else torch.empty(1, BLOCK)
        _unpack(packed[start // 2 : num_packed_bytes(stop)], table, rows)
        rows.mul_(scale)
        if rows.numel() > stop - start:
            x[start:stop] = rows[0, : stop - start]
    return x


def _unpack(packed: np.ndarray, table: np.ndarray, rows: Tensor) -> None:
    """Write what `packed`, uint8 [up to 32 * blocks], stands for to `rows`, fp32 [blocks, 64], and zeros behind it."""
    pairs = rows.numpy().reshape(-1).view(np.complex64)  # two fp32 move as one number, no arithmetic is done with them
    pairs[packed.size :] = 0
    np.take(table.view(np.complex64)[:, 0], packed, out=pairs[: packed.size], mode="clip")


def check_codes(name: str, packed: np.ndarray, numel: int) -> None:
    """Raise CorruptObject when a code is 8, which neither codec writes, or the unused half byte isn't zero."""
    wrong = ((packed & 0x0F) == 0x08) | ((packed & 0xF0) == 0x80)
    if wrong.any():
        byte = int(np.argmax(wrong))
        place = 2 * byte + int(packed[byte] & 0x0F != 0x08)
        raise CorruptObject(f"value {place} of an {name} payload has code 8, none has: refuse the offer that names it")
    if numel % 2 and packed[-1] & 0xF0:
        raise CorruptObject(
            f"the last half byte of an {name} payload of {numel} values must be 0: refuse the offer that names it"
        )
