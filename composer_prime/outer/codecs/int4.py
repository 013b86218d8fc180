"""int4 in blocks of 64 with one bf16 scale a block: symmetric, round half to even, 7.53 times smaller than fp32.

Layout, little endian: ceil(n / 64) bf16 scales, then ceil(n / 2) bytes of two codes, -7 to 7 in two's complement;
value i is q[i] * scale[i // 64]. A scale is absmax / 7 cut to bf16, so every product is exact. Value 2i is the low half
of byte i and value 2i + 1 the high half; an odd vector ends with a half of zeros. Vectors are walked in short spans of
whole blocks, so that the dozen passes over a span stay in the core's cache.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.chunks import empty, first_nonfinite
from composer_prime.outer.codecs.base import FixedSize, check_encodable, check_size

LARGEST = 7
LITTLE_16 = np.dtype("<u2")
BLOCK = 64
SPAN = 2**17
"""Elements in a span. On 25 M values 16 Ki took twice as long, 128 Ki to 1 Mi didn't differ by more than the noise."""
TABLE = np.array(
    [(low - 16 * (low > 7), high - 16 * (high > 7)) for high in range(16) for low in range(16)], np.float32
)
"""What each byte stands for, fp32 [256, 2]."""


class Int4Codec(FixedSize):
    """4.25 bits a value; |error| at most absmax / 14 in each block, and absmax / 128 for its largest value.

    The scale has 8 significant bits and |q| 3, so decoding never rounds; the largest value of a block always has
    |q| = 7, so the decoded block has the same scale again. A block under 6.5e-40 becomes zeros.
    """

    name = "int4"
    lossy = True
    sliceable = True
    block = BLOCK

    def encode(self, x: Tensor) -> bytes:
        """See `Codec.encode`. Every finite vector can be coded."""
        numel, blocks = x.numel(), _num_blocks(x.numel())
        payload = np.empty(self.nbytes(numel), dtype=np.uint8)
        scales, packed = payload[: 2 * blocks].view(LITTLE_16), payload[2 * blocks :]
        for start, stop in _block_spans(numel):
            rows = _as_blocks(x[start:stop])
            scale = torch.amax(rows.abs(), dim=1, keepdim=True)  # NaN is passed on
            if first_nonfinite(scale.view(-1)) is not None:
                check_encodable(self, x[start:stop], x[start:stop], start)
            bits = scale.div_(LARGEST).view(torch.int32).bitwise_and_(~0xFFFF)
            scales[start // BLOCK :][: len(rows)] = (bits >> 16).view(-1).numpy()
            steps = rows / torch.where(scale > 0, scale, torch.inf)  # x / inf = 0: the zeros of an empty block
            codes = steps.round_().clamp_(-LARGEST, LARGEST).to(torch.int8)  # torch rounds half to even
            _pack(codes, packed[start // 2 : _num_packed_bytes(stop)])
        return payload.tobytes()

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> Tensor:
        """See `Codec.decode`."""
        check_size(self, data, numel)
        blocks = _num_blocks(numel)
        scales = torch.from_numpy(np.frombuffer(data, LITTLE_16, count=blocks).astype(np.int32) << 16)
        scales = scales.view(torch.float32)
        packed = np.frombuffer(data, np.uint8, offset=2 * blocks)
        _check_scales(scales)
        _check_codes(packed, numel)
        return _decode_blocks(packed, scales, numel)

    def nbytes(self, numel: int) -> int:
        """See `Codec.nbytes`."""
        return 2 * _num_blocks(numel) + _num_packed_bytes(numel)


def _check_scales(scales: Tensor) -> None:
    """Raise CorruptObject unless every scale is one that `encode` writes."""
    sound = (scales.view(torch.int32) >= 0) & torch.isfinite(scales * LARGEST)  # the sign bit makes bits negative
    if not bool(sound.all()):
        block = int(torch.nonzero(~sound)[0])
        raise CorruptObject(
            f"scale {block} of an int4 payload is {float(scales[block])}, it must be 0 or a positive number whose "
            f"{LARGEST}-fold is finite: refuse the offer that names it"
        )


def _num_blocks(numel: int) -> int:
    """Blocks that `numel` values fill, the last one perhaps in part."""
    return -(-numel // BLOCK)


def _num_packed_bytes(numel: int) -> int:
    """Bytes of `numel` codes."""
    return -(-numel // 2)


def _block_spans(numel: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of spans of whole blocks that cover `range(numel)`; a short last block is one by itself."""
    whole = numel // BLOCK * BLOCK
    for start in range(0, whole, SPAN):
        yield start, min(start + SPAN, whole)
    if whole < numel:
        yield whole, numel


def _as_blocks(span: Tensor) -> Tensor:
    """A span, fp32 [n], as rows of one block, fp32 [blocks, 64]: a view, or for a short block a copy with zeros."""
    if span.numel() % BLOCK:
        padded = torch.zeros(BLOCK, dtype=torch.float32)
        padded[: span.numel()] = span
        span = padded
    return span.view(-1, BLOCK)


def _pack(codes: Tensor, packed: np.ndarray) -> None:
    """Write codes, int8 [blocks, 64] of which the low 4 bits count, to `packed`, uint8 [up to 32 * blocks]."""
    pairs = codes.numpy().reshape(-1).view(LITTLE_16)
    halves = (pairs & 0x0F) | (pairs >> 4 & 0xF0)
    packed[:] = halves[: packed.size]


def _decode_blocks(packed: np.ndarray, scales: Tensor, numel: int) -> Tensor:
    """fp32 [numel]: what each code stands for, times its block's scale.

    packed      uint8 [ceil(numel / 2)]
    scales      fp32 [blocks]
    """
    x = empty(numel)
    for start, stop in _block_spans(numel):
        scale = scales[start // BLOCK : _num_blocks(stop)].view(-1, 1)
        rows = x[start:stop].view(-1, BLOCK) if (stop - start) % BLOCK == 0 else torch.empty(1, BLOCK)
        _unpack(packed[start // 2 : _num_packed_bytes(stop)], rows)
        rows.mul_(scale)
        if rows.numel() > stop - start:
            x[start:stop] = rows[0, : stop - start]
    return x


def _unpack(packed: np.ndarray, rows: Tensor) -> None:
    """Write what `packed`, uint8 [up to 32 * blocks], stands for to `rows`, fp32 [blocks, 64], and zeros behind it."""
    pairs = rows.numpy().reshape(-1).view(np.complex64)  # two fp32 move as one number, no arithmetic is done with them
    pairs[packed.size :] = 0
    np.take(TABLE.view(np.complex64)[:, 0], packed, out=pairs[: packed.size], mode="clip")


def _check_codes(packed: np.ndarray, numel: int) -> None:
    """Raise CorruptObject when a code is 8, which no encoder writes, or the unused half byte isn't zero."""
    wrong = ((packed & 0x0F) == 0x08) | ((packed & 0xF0) == 0x80)
    if wrong.any():
        byte = int(np.argmax(wrong))
        place = 2 * byte + int(packed[byte] & 0x0F != 0x08)
        raise CorruptObject(f"value {place} of an int4 payload has code 8, none has: refuse the offer that names it")
    if numel % 2 and packed[-1] & 0xF0:
        raise CorruptObject(
            f"the last half byte of an int4 payload of {numel} values must be 0: refuse the offer that names it"
        )
