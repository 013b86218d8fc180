"""What is particular to the codecs of 4 bits: layout, rounding against a reference, limits, and what is refused."""

import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from composer_prime.errors import CorruptObject, SiteError
from composer_prime.outer.codecs import get_codec
from tests.outer.reference import random_fp32, same_bits

INT4, E3M0 = get_codec("int4"), get_codec("e3m0")
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


@pytest.mark.parametrize("codec", [INT4, E3M0], ids=["int4", "e3m0"])
@pytest.mark.parametrize("place", [0, 1, 64, 127, 128])
def test_code_8_is_refused_by_place(codec, place):
    codes = [1] * 129
    codes[place] = 8
    head = codec.nbytes(129) - 65
    with pytest.raises(CorruptObject, match=rf"value {place} of an {codec.name} payload has code 8"):
        codec.decode(bytes([100] * head) + packed(codes), 129)
    spare = bytearray(bytes([100] * head) + packed([1] * 129))
    assert codec.decode(bytes(spare), 129).shape == (129,)
    spare[-1] |= 0x10
    with pytest.raises(CorruptObject, match="the last half byte of an"):
        codec.decode(bytes(spare), 129)


def e3m0_reference(x: np.ndarray) -> np.ndarray:
    """Each value's nearest level of its block by exact comparison; of two as near the larger one."""
    decoded = []
    for start in range(0, len(x), 64):
        block = [Fraction(float(value)) for value in x[start : start + 64]]
        powers = [Fraction(2) ** power for power in range(-126, 128)]
        largest = max(abs(value) for value in block)
        top = nearest([Fraction(0), *powers], largest) if largest >= powers[0] / 2 else Fraction(0)
        levels = [Fraction(0)] + [top / 2**down for down in range(6, -1, -1) if top / 2**down >= powers[0]]
        for value in block:
            decoded.append(float(nearest(levels, abs(value))) * (-1 if value < 0 else 1) + 0.0)
    return np.array(decoded, dtype=np.float32)


def nearest(levels: list[Fraction], value: Fraction) -> Fraction:
    return min(reversed(levels), key=lambda level: abs(level - value))


@pytest.mark.parametrize("largest", [2.5e38, 1.0, 1e-35, 1.5e-36, 1.2e-38])
def test_e3m0_takes_the_nearest_level(largest):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(150) * largest * 10.0 ** rng.uniform(-3, -0.7, 150)).astype(np.float32)
    parts = np.array([1, 1.5, 0.75, 2**-6, 2**-7, 0.99 * 2**-7, 3 * 2**-8, -0.0])
    x[:8] = (np.minimum(parts * largest, 2.5e38)).astype(np.float32)
    expected = e3m0_reference(x)
    assert same_bits(E3M0.decode(E3M0.encode(torch.from_numpy(x)), 150).numpy(), expected)


def test_e3m0_bytes_are_the_documented_ones():
    x = torch.tensor([4.0, -2.0, 0.0, 4 / 64, -4 / 64, 0.0, 1.0])
    assert E3M0.encode(x) == bytes([129]) + packed([7, 14, 0, 1, 9, 0, 5])


def test_e3m0_refuses_what_would_round_to_infinity():
    assert E3M0.decode(E3M0.encode(torch.tensor([2.55e38])), 1)[0] == 2.0**127
    with pytest.raises(SiteError, match=r"value 65 of the pseudo-gradient is -2.5.*e\+38, e3m0 needs finite values"):
        E3M0.encode(torch.tensor([0.0] * 65 + [-2.56e38]))


def test_e3m0_refuses_exponents_and_values_that_no_encoder_writes():
    ones = packed([1] * 64)
    with pytest.raises(CorruptObject, match="exponent 1 of an e3m0 payload is 255"):
        E3M0.decode(bytes([254, 255]) + ones + ones, 128)
    for top in (0, 6):
        with pytest.raises(CorruptObject, match=rf"block 1 of an e3m0 payload has exponent {top} and values under"):
            E3M0.decode(bytes([7, top]) + ones + ones, 128)
    assert (E3M0.decode(bytes([7, 6]) + ones + packed([2, 15] * 32), 128).abs() >= 2.0**-126).all()
