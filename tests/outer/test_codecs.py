"""What is particular to each codec: layout, rounding against a reference, limits, and what its decoder refuses."""

import struct

import numpy as np
import pytest
import torch

from composer_prime.errors import ConfigError, CorruptObject, SiteError
from composer_prime.outer.codecs import CODECS, get_codec
from tests.outer.reference import random_fp32, same_bits

INT8, BF16, FP32 = get_codec("int8"), get_codec("bf16"), get_codec("fp32")
FLT_MAX = float(np.finfo(np.float32).max)


def test_an_unknown_codec_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r'outer.codec \("int7"\) must be one of fp32, bf16, int8'):
        get_codec("int7")
    assert all(get_codec(name).name == name for name in CODECS)


def test_fp32_is_the_little_endian_bytes():
    assert FP32.encode(torch.tensor([1.0, -2.0, 1e-45])) == struct.pack("<3f", 1.0, -2.0, 1e-45)


def test_bf16_rounds_to_nearest_even_by_bits():
    x = random_fp32(np.random.default_rng(0), 1_000_000)
    bits = x.view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    assert BF16.encode(torch.from_numpy(x)) == expected.tobytes()


def test_bf16_refuses_what_would_round_to_infinity():
    assert torch.isfinite(BF16.decode(BF16.encode(torch.tensor([3.38e38])), 1)).all()
    with pytest.raises(SiteError, match=r"value 1 of the pseudo-gradient is 3.4028.*e\+38, bf16 needs finite values"):
        BF16.encode(torch.tensor([0.0, FLT_MAX]))


def int8_reference(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scales, values) block by block from the documented layout."""
    scales, values = [], []
    for start in range(0, len(x), 256):
        block = x[start : start + 256]
        bits = (np.abs(block).max() / np.float32(127)).astype(np.float32).view(np.uint32) & np.uint32(0xFFFFFF00)
        scale = bits.view(np.float32)
        steps = block / scale if scale > 0 else np.zeros_like(block)
        scales.append(scale)
        values.append(np.clip(np.rint(steps), -127, 127).astype(np.int8))
    return np.array(scales, dtype="<f4"), np.concatenate(values)


@pytest.mark.parametrize("largest", [1e30, 1e-30, 1e-39, 2e-41])
def test_int8_bytes_are_those_of_the_reference(largest):
    x = random_fp32(np.random.default_rng(1), 100_003, largest)
    x[512:768] = 0
    scales, values = int8_reference(x)
    payload = INT8.encode(torch.from_numpy(x))
    assert payload == scales.tobytes() + values.tobytes()
    decoded = INT8.decode(payload, len(x)).numpy()
    assert same_bits(decoded, values * np.repeat(scales, 256)[: len(x)])


def test_int8_products_are_exact():
    x = random_fp32(np.random.default_rng(2), 100_000)
    payload = INT8.encode(torch.from_numpy(x))
    scales = np.frombuffer(payload, "<f4", count=391).astype(np.float64)
    values = np.frombuffer(payload, np.int8, offset=4 * 391).astype(np.float64)
    exact = values * np.repeat(scales, 256)[:100_000]
    assert np.array_equal(INT8.decode(payload, 100_000).numpy().astype(np.float64), exact)


def test_int8_rounds_half_to_even():
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    assert list(np.frombuffer(INT8.encode(x)[4:], np.int8)) == [127, 0, 2, 2, 0, -2, -2]


def test_int8_holds_the_largest_and_the_smallest_floats():
    x = torch.tensor([FLT_MAX, -FLT_MAX, 0.0])
    assert torch.allclose(INT8.decode(INT8.encode(x), 3), x, rtol=2**-14, atol=0)
    smallest = torch.tensor([1e-45, -1e-45, 2e-41])
    assert not INT8.decode(INT8.encode(smallest), 3).any()
    assert INT8.decode(INT8.encode(torch.tensor([1e-40])), 1)[0] > 0


def with_scale(scale: float) -> bytes:
    return struct.pack("<f", scale) + bytes([1] * 10)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 2.0**127, 1 + 2.0**-23])
def test_int8_refuses_scales_that_no_encoder_writes(scale):
    with pytest.raises(CorruptObject, match="scale 0 of an int8 payload is"):
        INT8.decode(with_scale(scale), 10)
    assert INT8.decode(with_scale(1.0), 10).sum() == 10


@pytest.mark.parametrize("place", [0, 255, 300, 599])
def test_int8_refuses_minus_128_and_says_where(place):
    payload = bytearray(INT8.encode(torch.ones(600)))
    payload[12 + place] = 0x80
    with pytest.raises(CorruptObject, match=f"value {place} of an int8 payload is -128"):
        INT8.decode(payload, 600)


@pytest.mark.parametrize(("codec", "bits"), [(FP32, "<I"), (BF16, "<H")])
def test_plain_codecs_refuse_payloads_that_are_not_finite_and_say_where(codec, bits):
    payload = bytearray(codec.encode(torch.ones(600)))
    width = struct.calcsize(bits)
    for pattern in (0x7F80, 0xFF80, 0x7FC0):
        bad = payload.copy()
        struct.pack_into(bits, bad, 599 * width, pattern << (8 * width - 16))
        with pytest.raises(CorruptObject, match=f"value 599 of a {codec.name} payload is"):
            codec.decode(bytes(bad), 600)
