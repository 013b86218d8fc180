"""A delta gives back exactly the bits it was made for, is small where little changed, and is refused when it is bad."""

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.errors import CorruptObject
from composer_prime.export.bits import DTYPES, as_bits, as_values, bits_sha256, rounded_bits
from composer_prime.export.delta import BLOCK, apply_delta, encode_delta, num_changed


def random_bits(rng: np.random.Generator, size: int, dtype: type) -> np.ndarray:
    return rng.integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)


@settings(max_examples=150, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.one_of(st.integers(0, 50), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])),
    share=st.sampled_from([0.0, 1e-5, 0.1, 1.0]),
    dtype=st.sampled_from([np.uint16, np.uint32]),
)
def test_applied_to_its_base_a_delta_gives_the_new_bits(seed, size, share, dtype):
    rng = np.random.default_rng(seed)
    old = random_bits(rng, size, dtype)
    new = np.where(rng.random(size) < share, random_bits(rng, size, dtype), old)
    before = old.copy()
    made = apply_delta(old, encode_delta(old, new))
    assert made.dtype == new.dtype and np.array_equal(made, new) and np.array_equal(old, before)
    assert num_changed(old, new) == int((old != new).sum())


@pytest.mark.parametrize("name", DTYPES)
def test_minus_zero_infinities_and_the_payload_of_a_nan_survive(name):
    size = DTYPES[name].itemsize
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0], dtype=DTYPES[name])
    old = as_bits(special).copy()
    new = as_bits(special.flip(0).contiguous()).copy()
    new[2] ^= 0x35  # a NaN of another payload
    made = apply_delta(old, encode_delta(old, new))
    assert np.array_equal(made, new) and made.itemsize == size
    values = as_values(made, DTYPES[name])
    assert values.isnan().sum() == 1 and torch.equal(values.signbit(), as_values(new, DTYPES[name]).signbit())
    assert bits_sha256(made) == bits_sha256(as_bits(values)) != bits_sha256(old)


def test_every_pair_of_bf16_patterns_that_are_a_step_apart_is_told_apart():
    old = np.arange(2**16, dtype=np.uint16)
    for step in (1, 2**15, 2**16 - 1):
        new = old + np.uint16(step)
        assert np.array_equal(apply_delta(old, encode_delta(old, new)), new)


def test_rounding_to_bf16_is_torchs_own_for_long_vectors():
    values = torch.randn(5 * 2**20 + 3, generator=torch.Generator().manual_seed(0))
    values[0] = -0.0
    assert np.array_equal(rounded_bits(values, torch.bfloat16), as_bits(values.to(torch.bfloat16)))


def test_what_did_not_change_costs_next_to_nothing_and_a_step_of_few_weights_little():
    rng = np.random.default_rng(0)
    old = random_bits(rng, 2**20, np.uint16)
    assert len(encode_delta(old, old)) < 64
    new = old.copy()
    new[rng.integers(0, old.size, old.size // 100)] += np.uint16(1)
    assert len(encode_delta(old, new)) < old.nbytes / 80  # 1 % of the weights: 8 bits of place and 1 of change each


def test_cut_changed_or_overlong_bytes_are_refused():
    rng = np.random.default_rng(1)
    old = random_bits(rng, 1000, np.uint16)
    new = np.where(rng.random(1000) < 0.3, random_bits(rng, 1000, np.uint16), old)
    delta = encode_delta(old, new)
    with pytest.raises(CorruptObject, match=r"ends|decompressed"):
        apply_delta(old, delta[:-5])
    with pytest.raises(CorruptObject, match="ends"):
        apply_delta(np.concatenate([old, random_bits(rng, BLOCK, np.uint16)]), delta)
    with pytest.raises(CorruptObject, match=r"changes \d+ of 100 weights"):
        apply_delta(old[:100], delta)
    with pytest.raises(CorruptObject, match="can't be decompressed"):
        apply_delta(old, b"no zstd at all")
    with pytest.raises(CorruptObject, match="goes on behind its 0 weights"):
        apply_delta(old[:0], delta)
    far = np.array([1], "<u4").tobytes() + bytes([255, 255, 255]) + bytes(2)
    with pytest.raises(CorruptObject, match="changes weight 16777215 of 1000"):
        apply_delta(old, zstandard.compress(far))
