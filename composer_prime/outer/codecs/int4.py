"""int4 in blocks of 64 with one bf16 scale a block: symmetric, round half to even, 7.53 times smaller than fp32.

Layout, little endian: ceil(n / 64) bf16 scales, then ceil(n / 2) bytes of two codes (see nibbles.py), -7 to 7 in two's
complement; value i is q[i] * scale[i // 64]. A scale is absmax / 7 cut to bf16, so every product is exact.
"""

import numpy as np
import torch
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.chunks import first_nonfinite
from composer_prime.outer.codecs import nibbles
from composer_prime.outer.codecs.base import FixedSize, check_encodable, check_size

LARGEST = 7
LITTLE_16 = np.dtype("<u2")
TABLE = nibbles.make_table([float(code if code < 8 else code - 16) for code in range(16)])


class Int4Codec(FixedSize):
    """4.25 bits a value; |error| at most absmax / 14 in each block, and absmax / 128 for its largest value.

    The scale has 8 significant bits and |q| 3, so decoding never rounds; the largest value of a block always has
    |q| = 7, so the decoded block has the same scale again. A block under 6.5e-40 becomes zeros.
    """

    name = "int4"
    lossy = True
    sliceable = True
    block = 64

    def encode(self, x: Tensor) -> bytes:
        """See `Codec.encode`. Every finite vector can be coded."""
        numel, blocks = x.numel(), nibbles.num_blocks(x.numel())
        payload = np.empty(self.nbytes(numel), dtype=np.uint8)
        scales, packed = payload[: 2 * blocks].view(LITTLE_16), payload[2 * blocks :]
        for start, stop in nibbles.block_spans(numel):
            rows = nibbles.as_blocks(x[start:stop])
            scale = torch.amax(rows.abs(), dim=1, keepdim=True)  # NaN is passed on
            if first_nonfinite(scale.view(-1)) is not None:
                check_encodable(self, x[start:stop], x[start:stop], start)
            bits = scale.div_(LARGEST).view(torch.int32).bitwise_and_(~0xFFFF)
            scales[start // nibbles.BLOCK :][: len(rows)] = (bits >> 16).view(-1).numpy()
            steps = rows / torch.where(scale > 0, scale, torch.inf)  # x / inf = 0: the zeros of an empty block
            codes = steps.round_().clamp_(-LARGEST, LARGEST).to(torch.int8)  # torch rounds half to even
            nibbles.pack(codes, packed[start // 2 : nibbles.num_packed_bytes(stop)])
        return payload.tobytes()

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> Tensor:
        """See `Codec.decode`."""
        check_size(self, data, numel)
        blocks = nibbles.num_blocks(numel)
        scales = torch.from_numpy(np.frombuffer(data, LITTLE_16, count=blocks).astype(np.int32) << 16)
        scales = scales.view(torch.float32)
        packed = np.frombuffer(data, np.uint8, offset=2 * blocks)
        _check_scales(scales)
        nibbles.check_codes(self.name, packed, numel)
        return nibbles.decode_blocks(packed, scales, TABLE, numel)

    def nbytes(self, numel: int) -> int:
        """See `Codec.nbytes`."""
        return 2 * nibbles.num_blocks(numel) + nibbles.num_packed_bytes(numel)


def _check_scales(scales: Tensor) -> None:
    """Raise CorruptObject unless every scale is one that `encode` writes."""
    sound = (scales.view(torch.int32) >= 0) & torch.isfinite(scales * LARGEST)  # the sign bit makes bits negative
    if not bool(sound.all()):
        block = int(torch.nonzero(~sound)[0])
        raise CorruptObject(
            f"scale {block} of an int4 payload is {float(scales[block])}, it must be 0 or a positive number whose "
            f"{LARGEST}-fold is finite: refuse the offer that names it"
        )
