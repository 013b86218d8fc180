"""int8 in blocks of 256 with one scale a block: symmetric, round half to even, 3.94 times smaller than fp32.

Layout, little endian: ceil(n / 256) fp32 scales, then n int8 values; value i of the vector is q[i] * scale[i // 256].
A scale is absmax / 127 cut to 16 significant bits, so every product is exact: decoding never rounds, the decoded
vector codes to the same bytes again, and the largest float can't overflow. A block under 2.3e-41 becomes zeros.
"""

import numpy as np
import torch
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.chunks import empty, first_nonfinite, scratch, spans
from composer_prime.outer.codecs.base import FixedSize, check_encodable, check_size

BLOCK = 256
LARGEST = 127
LOW_BITS = 0xFF
"""The bits of a scale's significand that are cut: 24 - 8 = 16 stay, and 16 + 7 bits of |q| fit in fp32's 24."""

LITTLE_FP32 = np.dtype("<f4")


class Int8Codec(FixedSize):
    """1 byte a value and 4 a block; |error| at most scale / 2, that is absmax / 254, in each block."""

    name = "int8"
    lossy = True
    sliceable = True
    block = 256

    def encode(self, x: Tensor) -> bytes:
        """See `Codec.encode`. Every finite vector can be coded."""
        numel = x.numel()
        payload = np.empty(self.nbytes(numel), dtype=np.int8)
        values = torch.from_numpy(payload[payload.size - numel :])
        scales = torch.empty(_num_blocks(numel), dtype=torch.float32)
        work = scratch(numel)
        for start, stop in spans(numel):
            first, last = start // BLOCK, _num_blocks(stop)
            self._encode_span(x[start:stop], start, scales[first:last], values[start:stop], work[: stop - start])
        payload[: payload.size - numel].view(LITTLE_FP32)[:] = scales.numpy()
        return payload.tobytes()

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> Tensor:
        """See `Codec.decode`."""
        check_size(self, data, numel)
        blocks = _num_blocks(numel)
        scales = torch.from_numpy(np.frombuffer(data, LITTLE_FP32, count=blocks).astype(np.float32))
        coded = np.frombuffer(data, np.int8, offset=4 * blocks)
        _check_scales(scales)
        x = empty(numel)
        for start, stop in spans(numel):
            if coded[start:stop].min() < -LARGEST:
                place = start + int(np.argmin(coded[start:stop]))
                raise CorruptObject(
                    f"value {place} of an int8 payload is -128, the least is -{LARGEST}: refuse the offer that names it"
                )
            x[start:stop].copy_(torch.from_numpy(coded[start:stop].copy()))
            for rows, scale in _rows(x[start:stop], scales[start // BLOCK : _num_blocks(stop)]):
                rows.mul_(scale)
        return x

    def nbytes(self, numel: int) -> int:
        """See `Codec.nbytes`."""
        return 4 * _num_blocks(numel) + numel

    def _encode_span(self, chunk: Tensor, start: int, scales: Tensor, values: Tensor, work: Tensor) -> None:
        """Fill the scales and values of one span that begins at a block's start."""
        torch.abs(chunk, out=work)
        for rows, scale in _rows(work, scales):
            torch.amax(rows, dim=1, keepdim=True, out=scale)
        if first_nonfinite(scales) is not None:  # amax passes NaN on, so the scales tell for the whole span
            check_encodable(self, chunk, chunk, start)
        scales.div_(LARGEST)
        scales.view(torch.int32).bitwise_and_(~LOW_BITS)
        divisors = torch.where(scales > 0, scales, torch.inf)  # x / inf = 0: the zeros of an empty block
        work.copy_(chunk)
        for rows, divisor in _rows(work, divisors):
            rows.div_(divisor)
        values.copy_(work.round_().clamp_(-LARGEST, LARGEST))  # torch rounds half to even


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _rows(span: Tensor, per_block: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Views of a span as rows of one block, each with its column of `per_block`; the short last block by itself."""
    whole = span.numel() // BLOCK
    full = span[: whole * BLOCK].view(whole, BLOCK), per_block[:whole].view(whole, 1)
    short = span[whole * BLOCK :].view(1, -1), per_block[whole:].view(-1, 1)
    return [rows for rows in (full, short) if rows[0].numel()]


def _check_scales(scales: Tensor) -> None:
    """Raise CorruptObject unless every scale is one that `encode` writes."""
    bits = scales.view(torch.int32)
    sound = (bits >= 0) & (bits & LOW_BITS == 0) & torch.isfinite(scales * LARGEST)  # the sign bit makes bits negative
    if not bool(sound.all()):
        block = int(torch.nonzero(~sound)[0])
        raise CorruptObject(
            f"scale {block} of an int8 payload is {float(scales[block])}, it must be 0 or a positive number of 16 "
            f"significant bits whose {LARGEST}-fold is finite: refuse the offer that names it"
        )
