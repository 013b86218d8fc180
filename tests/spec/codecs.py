"""Payload codecs by docs/protocol.md, "Codecs": the decoders, and the encoders of parts and of the test vector."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCKS = {"fp32": 1, "bf16": 1, "int8": 256, "int4": 64, "topk": 4096}
MERGED = "int8"
_KEPT = 64
_LARGEST_MAGNITUDE = 0xFEF


class Undecodable(Exception):
    """Bytes that break a rule of their codec."""


def _ask(holds: Any, what: str) -> None:
    if not holds:
        raise Undecodable(what)


def size_bounds(codec: str, size: int) -> tuple[int, int]:
    """The least and the most bytes that `size` values may take."""
    blocks = -(-size // BLOCKS[codec])
    if codec == "topk":
        kept = _kept_of_blocks(size)
        rest = [min(4096, size - 4096 * block) - int(num) for block, num in enumerate(kept)]
        least = int(kept.sum())
        most = least + sum(free // 32 for free in rest)
        fixed = 3 * blocks + -(-2 * least // 8) + -(-5 * least // 8)
        return fixed + -(-least // 8), fixed + -(-most // 8)
    num_bytes = {"fp32": 4 * size, "bf16": 2 * size, "int8": 4 * blocks + size, "int4": 2 * blocks + -(-size // 2)}[
        codec
    ]
    return num_bytes, num_bytes


def decode(codec: str, data: bytes, size: int) -> Vector:
    """fp32 [size]; Undecodable where the bytes break a rule."""
    least, most = size_bounds(codec, size)
    _ask(least <= len(data) <= most, f"{len(data)} bytes for {size} values")
    values = _DECODERS[codec](np.frombuffer(data, np.uint8), size)
    _ask(np.isfinite(values).all(), "a value that isn't finite")
    return values


def _decode_fp32(data: Bytes, size: int) -> Vector:
    return data.view("<f4").astype(np.float32)


def _decode_bf16(data: Bytes, size: int) -> Vector:
    return _widened(data)


def _widened(halves: Bytes) -> Vector:
    return (halves.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_int8(data: Bytes, size: int) -> Vector:
    head = 4 * -(-size // 256)
    bits, codes = data[:head].view("<u4").astype(np.uint32), data[head:].view(np.int8)
    _ask(not (bits & 0xFF).any(), "a scale whose low 8 bits aren't 0")
    _ask_scales(bits.view(np.float32), 127)
    _ask((codes != -128).all(), "a code of -128")
    scales = np.repeat(bits.view(np.float32), 256)[:size]
    return codes.astype(np.float32) * scales


def _ask_scales(scales: Vector, largest: int) -> None:
    _ask(not np.signbit(scales).any(), "a scale with a sign bit")
    with np.errstate(over="ignore", invalid="ignore"):
        _ask(np.isfinite(scales * np.float32(largest)).all(), f"a scale of which {largest} times isn't finite")


def _decode_int4(data: Bytes, size: int) -> Vector:
    head = 2 * -(-size // 64)
    scales = _widened(data[:head])
    _ask_scales(scales, 7)
    nibbles = _nibbles(data[head:], size)
    codes = (nibbles ^ 8).astype(np.float32) - np.float32(8)
    return codes * np.repeat(scales, 64)[:size]


def _nibbles(data: Bytes, size: int) -> Bytes:
    """Codes of 4 bits, the first in the low half; none of them 8, nor any behind the last."""
    codes = np.stack([data & 15, data >> 4], axis=1).reshape(-1).astype(np.uint8)
    _ask(not codes[size:].any(), "a last high half that isn't 0")
    _ask((codes != 8).all(), "a code of 8")
    return codes[:size]


def _kept_of_blocks(size: int) -> npt.NDArray[np.int64]:
    lengths = np.minimum(4096, size - 4096 * np.arange(-(-size // 4096), dtype=np.int64))
    return np.where(lengths == 4096, _KEPT, -(-lengths // 64))


def _decode_topk(data: Bytes, size: int) -> Vector:
    kept = _kept_of_blocks(size)
    total, num_blocks = int(kept.sum()), len(kept)
    sizes = [3 * num_blocks, -(-2 * total // 8), -(-5 * total // 8)]
    head, kinds, lows, gaps = np.split(data, np.cumsum(sizes))
    low, high = _magnitudes(head)
    block = np.repeat(np.arange(num_blocks), kept)
    kind = _numbers(kinds, total, 2, "kinds")
    negative, is_high = kind & 1, kind >> 1
    positions = _positions(_numbers(lows, total, 5, "low gaps") + 32 * _unary(gaps, total), block, kept, size)

    some_high = np.bincount(block, weights=is_high, minlength=num_blocks)
    flat = low == high
    _ask((some_high[flat] == 0).all(), "a high magnitude that equals the low one")
    _ask(((some_high > 0) & (some_high < kept))[~flat].all(), "a magnitude that no value has")
    magnitude = np.where(is_high == 1, high[block], low[block])
    zero = magnitude == 0
    _ask(not (zero & (negative == 1)).any(), "a zero with a sign")
    place_in_block = np.arange(total) - np.repeat(np.cumsum(kept) - kept, kept)
    _ask((positions % 4096 == place_in_block)[zero].all(), "a zero behind a gap")
    bits = (magnitude.astype(np.uint32) << 19) | (negative.astype(np.uint32) << 31)
    values = np.zeros(size, np.float32)
    values[positions] = bits.view(np.float32)
    return values


def _magnitudes(head: Bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    triples = head.reshape(-1, 3).astype(np.int64)
    words = triples[:, 0] | (triples[:, 1] << 8) | (triples[:, 2] << 16)
    low, high = words & 0xFFF, words >> 12
    _ask((low <= high).all() and (high <= _LARGEST_MAGNITUDE).all(), "magnitudes out of order or bounds")
    return low, high


def _numbers(stream: Bytes, count: int, width: int, what: str) -> npt.NDArray[np.int64]:
    """`count` numbers of `width` bits, from the lowest bit of the first byte; the bits behind them 0."""
    bits = np.unpackbits(stream, bitorder="little").astype(np.int64)
    _ask(not bits[count * width :].any(), f"a bit behind the {what}")
    return bits[: count * width].reshape(count, width) @ (1 << np.arange(width))


def _unary(stream: Bytes, count: int) -> npt.NDArray[np.int64]:
    """`count` numbers, each so many 0 bits and a 1."""
    ones = np.flatnonzero(np.unpackbits(stream, bitorder="little"))
    _ask(len(ones) == count, "another number of gaps than of values")
    _ask(count == 0 or len(stream) == ones[-1] // 8 + 1, "a byte behind the last gap")
    return np.diff(ones, prepend=-1) - 1


def _positions(gaps: Any, block: Any, kept: Any, size: int) -> npt.NDArray[np.int64]:
    """Where the kept values stand, from the positions skipped before each; every one in its block."""
    ends = np.cumsum(gaps + 1) - 1
    starts = np.concatenate([[0], ends + 1])[np.cumsum(kept) - kept]
    in_block = ends - starts[block]
    lengths = np.minimum(4096, size - 4096 * np.arange(len(kept)))
    _ask((in_block < lengths[block]).all(), "a position behind its block")
    return in_block + 4096 * block


_DECODERS: dict[str, Callable[[Bytes, int], Vector]] = {
    "fp32": _decode_fp32,
    "bf16": _decode_bf16,
    "int8": _decode_int8,
    "int4": _decode_int4,
    "topk": _decode_topk,
}


BF16_END = np.float32(2.0**128 - 2.0**119)
"""From here on bf16 rounds to infinity."""


def encode(codec: str, values: Vector) -> bytes | None:
    """A vector's bytes; None where a value has no code."""
    if not np.isfinite(values).all() or (codec == "bf16" and np.abs(values).max() >= BF16_END):
        return None
    if codec == "fp32":
        return values.astype("<f4").tobytes()
    if codec == "bf16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    blocks = -(-len(values) // 256)
    padded = np.concatenate([values, np.zeros(256 * blocks - len(values), np.float32)]).reshape(blocks, 256)
    scales = np.abs(padded).max(axis=1) / np.float32(127)
    scales = (scales.view(np.uint32) & np.uint32(0xFFFFFF00)).view(np.float32)
    quotients = padded / np.where(scales == 0, np.float32(1), scales)[:, None]
    codes = np.where(scales[:, None] == 0, np.float32(0), np.clip(np.rint(quotients), -127, 127))
    return scales.astype("<f4").tobytes() + codes.astype(np.int8).reshape(-1)[: len(values)].tobytes()
