"""What is particular to int4: layout, rounding against a reference, limits, and what is refused."""

import struct

import numpy as np
import pytest
import torch

from composer_prime.errors import CorruptObject
from composer_prime.outer.codecs import get_codec
from tests.outer.reference import random_fp32

INT4 = get_codec("int4")
FLT_MAX = float(np.finfo(np.float32).max)


def packed(codes: list[int]) -> bytes:
    """Codes of 4 bits, the first of a pair in the low half."""
    even = codes + [0] * (len(codes) % 2)
    return bytes(low & 15 | (high & 15) << 4 for low, high in zip(even[::2], even[1::2], strict=True))


def int4_reference(x: np.ndarray) -> bytes:
    """The payload block by block from the documented layout."""
    scales, codes = [], []
    for start in range(0, len(x), 64):
        block = x[start : start + 64]
        bits = (np.abs(block).max() / np.float32(7)).astype(np.float32).view(np.uint32) >> 16
        scale = (bits << 16).astype(np.uint32).view(np.float32)
        steps = block / scale if scale > 0 else np.zeros_like(block)
        scales.append(bits)
        codes += np.clip(np.rint(steps), -7, 7).astype(int).tolist()
    return np.array(scales, dtype="<u2").tobytes() + packed(codes)


@pytest.mark.parametrize("largest", [1e30, 1e-30, 1e-38, 1e-39])
@pytest.mark.parametrize("numel", [10_003, 64, 63, 2])
def test_int4_bytes_are_those_of_the_reference(largest, numel):
    x = random_fp32(np.random.default_rng(1), numel, largest)
    x[128:192] = 0
    assert INT4.encode(torch.from_numpy(x)) == int4_reference(x)


def test_int4_products_are_exact():
    x = random_fp32(np.random.default_rng(2), 6400)
    payload = INT4.encode(torch.from_numpy(x))
    bits = np.frombuffer(payload, "<u2", count=100).astype(np.uint32) << 16
    scales = np.repeat(bits.view(np.float32).astype(np.float64), 64)
    halves = np.frombuffer(payload, np.uint8, offset=200).astype(np.int64)
    codes = np.stack([halves & 15, halves >> 4], axis=1).reshape(-1)
    exact = np.where(codes > 7, codes - 16, codes) * scales
    assert np.array_equal(INT4.decode(payload, 6400).numpy().astype(np.float64), exact)


def test_int4_holds_the_largest_and_the_smallest_floats():
    x = torch.tensor([FLT_MAX, -FLT_MAX, 0.0])
    assert torch.allclose(INT4.decode(INT4.encode(x), 3), x, rtol=2**-7, atol=0)
    assert not INT4.decode(INT4.encode(torch.tensor([1e-45, -6e-40])), 2).any()
    assert INT4.decode(INT4.encode(torch.tensor([7e-40])), 1)[0] > 0


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F80, 0xFF80, 0x8000, 0xBF80, 0x7F00])
def test_int4_refuses_scales_that_no_encoder_writes(bits):
    with pytest.raises(CorruptObject, match="scale 1 of an int4 payload is"):
        INT4.decode(struct.pack("<2H", 0x3F80, bits) + bytes(64), 128)


@pytest.mark.parametrize("place", [0, 1, 64, 127, 128])
def test_code_8_is_refused_by_place(place):
    codes = [1] * 129
    codes[place] = 8
    head = INT4.nbytes(129) - 65
    with pytest.raises(CorruptObject, match=rf"value {place} of an int4 payload has code 8"):
        INT4.decode(bytes([100] * head) + packed(codes), 129)
    spare = bytearray(bytes([100] * head) + packed([1] * 129))
    assert INT4.decode(bytes(spare), 129).shape == (129,)
    spare[-1] |= 0x10
    with pytest.raises(CorruptObject, match="the last half byte of an"):
        INT4.decode(bytes(spare), 129)
