"""int8 and int4 in blocks with one scale a block: symmetric, round half to even, 3.94 and 7.53 times smaller than fp32.

Layout, little endian: the scales of all blocks, then the codes; value i of the vector is q[i] * scale[i // block]. A
scale is absmax / largest |q|, cut to so few significant bits that every product is exact: decoding never rounds, and
the decoded vector codes to the same bytes again. Vectors are walked in short spans of whole blocks, so that the dozen
passes over a span stay in the core's cache.
"""

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.chunks import empty, first_nonfinite, spans
from composer_prime.outer.codecs.base import FixedSize, check_encodable, check_size

SPAN = 2**17
"""Elements in a span. On 25 M values 16 Ki took twice as long, 128 Ki to 1 Mi didn't differ by more than the noise."""
LITTLE_16, LITTLE_32 = np.dtype("<u2"), np.dtype("<u4")
TABLE = np.array(
    [(low - 16 * (low > 7), high - 16 * (high > 7)) for high in range(16) for low in range(16)], np.float32
)
"""What each byte of int4 stands for, fp32 [256, 2]."""


class BlockCodec(FixedSize):
    """What the two have in common."""

    name: str
    lossy = True
    sliceable = True
    block: int
    largest: int
    """The largest |q|."""
    cut_bits: int
    """Low bits of an fp32 scale that are zero."""
    scale_type: np.dtype
    """The high bits of an fp32 scale that are stored."""
    codes_a_byte: int

    def encode(self, x: Tensor) -> bytes:
        """See `Codec.encode`. Every finite vector can be coded."""
        numel = x.numel()
        payload = np.empty(self.nbytes(numel), dtype=np.uint8)
        scales_end = self._scale_bytes(numel)
        scales, packed = payload[:scales_end].view(self.scale_type), payload[scales_end:]
        for start, stop in self._spans(numel):
            rows = self._as_blocks(x[start:stop])
            scale = torch.amax(rows.abs(), dim=1, keepdim=True)  # NaN is passed on
            if first_nonfinite(scale.view(-1)) is not None:
                check_encodable(self, x[start:stop], x[start:stop], start)
            bits = scale.div_(self.largest).view(torch.int32).bitwise_and_(-1 << self.cut_bits)
            scales[start // self.block :][: len(rows)] = (bits >> self._unstored_bits).view(-1).numpy()
            steps = rows / torch.where(scale > 0, scale, torch.inf)  # x / inf = 0: the zeros of an empty block
            codes = steps.round_().clamp_(-self.largest, self.largest).to(torch.int8)  # torch rounds half to even
            self._pack(codes.numpy().reshape(-1), packed[start // self.codes_a_byte : self._code_bytes(stop)])
        return payload.tobytes()

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> Tensor:
        """See `Codec.decode`."""
        check_size(self, data, numel)
        stored = np.frombuffer(data, self.scale_type, count=self._num_blocks(numel))
        scales = torch.from_numpy(stored.astype(np.int32) << self._unstored_bits).view(torch.float32)
        packed = np.frombuffer(data, np.uint8, offset=self._scale_bytes(numel))
        self._check_scales(scales)
        x = empty(numel)
        for start, stop in self._spans(numel):
            codes = packed[start // self.codes_a_byte : self._code_bytes(stop)]
            self._check_codes(codes, start, stop - start)
            rows = (
                x[start:stop].view(-1, self.block) if (stop - start) % self.block == 0 else torch.zeros(1, self.block)
            )
            self._unpack(codes, rows)
            rows.mul_(scales[start // self.block : self._num_blocks(stop)].view(-1, 1))
            if rows.numel() > stop - start:
                x[start:stop] = rows[0, : stop - start]
        return x

    def nbytes(self, numel: int) -> int:
        """See `Codec.nbytes`."""
        return self._scale_bytes(numel) + self._code_bytes(numel)

    @abstractmethod
    def _pack(self, codes: np.ndarray, packed: np.ndarray) -> None:
        """Write codes, int8 [whole blocks], to `packed`, uint8 [at most their bytes]."""

    @abstractmethod
    def _unpack(self, packed: np.ndarray, rows: Tensor) -> None:
        """Write what `packed`, uint8, stands for to `rows`, fp32 [blocks, block]."""

    @abstractmethod
    def _check_codes(self, packed: np.ndarray, start: int, count: int) -> None:
        """Raise CorruptObject when one of `count` codes, from value `start` on, is none that an encoder writes."""

    def _check_scales(self, scales: Tensor) -> None:
        """Raise CorruptObject unless every scale is one that `encode` writes."""
        bits = scales.view(torch.int32)  # negative where the sign bit is set
        sound = (bits >= 0) & (bits & ((1 << self.cut_bits) - 1) == 0) & torch.isfinite(scales * self.largest)
        if not bool(sound.all()):
            block = int(torch.nonzero(~sound)[0])
            raise CorruptObject(
                f"scale {block} of an {self.name} payload is {float(scales[block])}, it must be 0 or a positive number "
                f"of {24 - self.cut_bits} significant bits whose {self.largest}-fold is finite: refuse the offer that "
                "names it"
            )

    @property
    def _unstored_bits(self) -> int:
        return 32 - 8 * self.scale_type.itemsize

    def _num_blocks(self, numel: int) -> int:
        """Blocks that `numel` values fill, the last one perhaps in part."""
        return -(-numel // self.block)

    def _scale_bytes(self, numel: int) -> int:
        return self.scale_type.itemsize * self._num_blocks(numel)

    def _code_bytes(self, numel: int) -> int:
        return -(-numel // self.codes_a_byte)

    def _spans(self, numel: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of spans of whole blocks that cover `range(numel)`; a short last block is its own."""
        whole = numel // self.block * self.block
        yield from spans(whole, SPAN)
        if whole < numel:
            yield whole, numel

    def _as_blocks(self, span: Tensor) -> Tensor:
        """A span, fp32 [n], as rows of one block: a view, or for a short block a copy with zeros behind it."""
        if span.numel() % self.block:
            padded = torch.zeros(self.block, dtype=torch.float32)
            padded[: span.numel()] = span
            span = padded
        return span.view(-1, self.block)


class Int8Codec(BlockCodec):
    """Blocks of 256, 1 byte a value and 4 a block; |error| at most scale / 2, that is absmax / 254, in each block.

    A scale has 16 significant bits and |q| 7, so a product fits in fp32's 24. A block under 2.3e-41 becomes zeros.
    """

    name = "int8"
    block = 256
    largest = 127
    cut_bits = 8
    scale_type = LITTLE_32
    codes_a_byte = 1

    def _pack(self, codes: np.ndarray, packed: np.ndarray) -> None:
        packed[:] = codes[: packed.size].view(np.uint8)

    def _unpack(self, packed: np.ndarray, rows: Tensor) -> None:
        rows.numpy().reshape(-1)[: packed.size] = packed.view(np.int8)

    def _check_codes(self, packed: np.ndarray, start: int, count: int) -> None:
        codes = packed.view(np.int8)
        if codes.min() < -self.largest:
            place = start + int(np.argmin(codes))
            raise CorruptObject(
                f"value {place} of an int8 payload is -128, the least is -127: refuse the offer that names it"
            )


class Int4Codec(BlockCodec):
    """Blocks of 64, 4.25 bits a value; |error| at most absmax / 14 in each block, absmax / 128 for its largest value.

    Value 2i is the low half of byte i and value 2i + 1 the high half, -7 to 7 in two's complement; an odd vector ends
    with a half of zeros. A scale is a bf16, with 8 significant bits beside |q|'s 3; the largest value of a block always
    has |q| = 7, so the decoded block has the same scale again. A block under 6.5e-40 becomes zeros.
    """

    name = "int4"
    block = 64
    largest = 7
    cut_bits = 16
    scale_type = LITTLE_16
    codes_a_byte = 2

    def _pack(self, codes: np.ndarray, packed: np.ndarray) -> None:
        pairs = codes.view(LITTLE_16)
        halves = (pairs & 0x0F) | (pairs >> 4 & 0xF0)
        packed[:] = halves[: packed.size]

    def _unpack(self, packed: np.ndarray, rows: Tensor) -> None:
        pairs = rows.numpy().reshape(-1).view(np.complex64)  # two fp32 move as one number, nothing is computed
        np.take(TABLE.view(np.complex64)[:, 0], packed, out=pairs[: packed.size], mode="clip")

    def _check_codes(self, packed: np.ndarray, start: int, count: int) -> None:
        wrong = ((packed & 0x0F) == 0x08) | ((packed & 0xF0) == 0x80)
        if wrong.any():
            byte = int(np.argmax(wrong))
            place = start + 2 * byte + int(packed[byte] & 0x0F != 0x08)
            raise CorruptObject(
                f"value {place} of an int4 payload has code 8, none has: refuse the offer that names it"
            )
        if count % 2 and packed[-1] & 0xF0:
            raise CorruptObject("the last half byte of an odd int4 payload must be 0: refuse the offer that names it")
