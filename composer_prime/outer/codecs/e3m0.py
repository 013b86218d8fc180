"""E3M0 in blocks of 64: a sign and 3 bits of exponent, so powers of two only; 7.76 times smaller than fp32.

Layout: ceil(n / 64) bytes, each block's top exponent T as in fp32 (biased by 127), then ceil(n / 2) bytes of two codes
(see nibbles.py). Code c = 0 is zero, 1 to 7 is 2**(T - 127 + c - 7), plus 8 where negative.
"""

import numpy as np
import torch
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.codecs import nibbles
from composer_prime.outer.codecs.base import FixedSize, check_encodable, check_size

MAGNITUDE = 0x7FFFFFFF
HALF = 0x400000
"""Half of the last place that is kept, as bits of fp32: adding it rounds to the nearest power of two, 1.5 upwards."""

SMALLEST = HALF
"""Bits of 2**-127: what is smaller becomes zero, the least power of two that is kept is 2**-126."""

TOO_LARGE = 0x7F800000 - HALF
"""Bits of 1.5 * 2**127: what is as large would round to infinity."""

LEVELS = [0.0] + [2.0 ** (code - 7) for code in range(1, 8)]
TABLE = nibbles.make_table(LEVELS + [-level for level in LEVELS])


class E3m0Codec(FixedSize):
    """4.125 bits a value; |error| at most |x| / 3, or absmax / 96 where that is more. 2.55e38 and more is refused.

    Each value becomes the nearest of its block's levels. All is done on the bits, nothing rounds in decoding, and
    powers of two stay what they are.

    Source: Streaming DiLoCo (arXiv:2501.18512), which sends its pseudo-gradients in E3M0.
    """

    name = "e3m0"
    lossy = True
    sliceable = True
    block = 64

    def encode(self, x: Tensor) -> bytes:
        """See `Codec.encode`."""
        numel, blocks = x.numel(), nibbles.num_blocks(x.numel())
        payload = np.empty(self.nbytes(numel), dtype=np.uint8)
        tops, packed = payload[:blocks], payload[blocks:]
        for start, stop in nibbles.block_spans(numel):
            bits = nibbles.as_blocks(x[start:stop]).view(torch.int32)
            magnitude = bits & MAGNITUDE
            largest = torch.amax(magnitude, dim=1, keepdim=True)
            if bool((largest >= TOO_LARGE).any()):
                held = (x[start:stop].view(torch.int32) & MAGNITUDE) < TOO_LARGE
                check_encodable(self, x[start:stop], torch.where(held, x[start:stop], torch.inf), start)
            top = (largest + HALF) >> 23
            tops[start // nibbles.BLOCK :][: len(bits)] = top.view(-1).numpy()
            below = top - 7
            least = torch.where(below >= 1, below << 23, SMALLEST)  # half of the block's smallest level
            codes = ((magnitude + HALF) >> 23).sub_(below).clamp_(min=1)
            codes.bitwise_or_((bits >> 28).bitwise_and_(8)).mul_(magnitude >= least)
            nibbles.pack(codes.to(torch.int8), packed[start // 2 : nibbles.num_packed_bytes(stop)])
        return payload.tobytes()

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> Tensor:
        """See `Codec.decode`."""
        check_size(self, data, numel)
        blocks = nibbles.num_blocks(numel)
        tops = np.frombuffer(data, np.uint8, count=blocks).astype(np.int32)
        packed = np.frombuffer(data, np.uint8, offset=blocks)
        nibbles.check_codes(self.name, packed, numel)
        _check_tops(tops, packed)
        scales = torch.from_numpy(tops << 23).view(torch.float32)
        return nibbles.decode_blocks(packed, scales, TABLE, numel)

    def nbytes(self, numel: int) -> int:
        """See `Codec.nbytes`."""
        return nibbles.num_blocks(numel) + nibbles.num_packed_bytes(numel)


def _check_tops(tops: np.ndarray, packed: np.ndarray) -> None:
    """Raise CorruptObject unless every top exponent is finite and no code stands for less than 2**-126."""
    if (tops == 255).any():
        block = int(np.argmax(tops == 255))
        raise CorruptObject(
            f"exponent {block} of an e3m0 payload is 255, the most is 254: refuse the offer that names it"
        )
    low = np.flatnonzero(tops < 7)  # only these have codes for what is too small
    if low.size:
        halves = np.zeros((tops.size, nibbles.BLOCK // 2), dtype=np.uint8)
        halves.reshape(-1)[: packed.size] = packed
        magnitudes = np.stack([halves[low] & 7, halves[low] >> 4 & 7])
        least = np.where(magnitudes > 0, magnitudes, 8).min(axis=(0, 2))
        wrong = (least < 8) & (tops[low] - 7 + least < 1)
        if wrong.any():
            block = int(low[np.argmax(wrong)])
            raise CorruptObject(
                f"block {block} of an e3m0 payload has exponent {tops[block]} and values under 2**-126: "
                "refuse the offer that names it"
            )
