"""The weighted mean: bits of separately rounded fp32, never of a fused multiply-add; and exact multipliers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.errors import ConfigError, ProtocolError
from composer_prime.outer import chunks
from composer_prime.outer.aggregate import weighted_mean
from composer_prime.outer.shares import multipliers
from tests.outer.reference import fma, random_fp32, same_bits


def test_bits_equal_numpy_over_every_kind_of_float():
    rng = np.random.default_rng(0)
    vectors = [random_fp32(rng, 2_000_003) for _ in range(3)]
    shares = [float(np.float32(share)) for share in (0.2, 0.3, 0.5)]
    expected = np.float32(shares[0]) * vectors[0]
    for share, vector in zip(shares[1:], vectors[1:], strict=True):
        expected = expected + np.float32(share) * vector
    total = weighted_mean([(s, torch.from_numpy(v)) for s, v in zip(shares, vectors, strict=True)])
    assert same_bits(total.numpy(), expected)


@pytest.mark.parametrize("numel", [1, 7, 1003, chunks.CHUNK_ELEMENTS + 5])
def test_a_case_that_a_fused_multiply_add_gets_wrong_comes_out_right(numel):
    a = 1 + 2.0**-12  # a * a = 1 + 2**-11 + 2**-24; the last bit falls off when the product is rounded
    c = -(1 + 2.0**-11)
    assert fma(a, a, c) == 2.0**-24
    total = weighted_mean([(1.0, torch.full((numel,), c)), (a, torch.full((numel,), a))])
    assert torch.equal(total, torch.zeros(numel))


def test_fused_and_separate_differ_on_ordinary_numbers_and_ours_is_the_separate_one():
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(2_000).astype(np.float32) for _ in range(2))
    share = float(np.float32(1 / 3))
    total = weighted_mean([(share, torch.from_numpy(x)), (share, torch.from_numpy(y))]).numpy()
    first = np.float32(share) * x
    fused = np.array([fma(share, float(v), float(c)) for v, c in zip(y, first, strict=True)], dtype=np.float32)
    assert same_bits(total, first + np.float32(share) * y)
    assert (fused != total).sum() > 100


def test_inputs_stay_and_the_result_is_new_memory():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    total = weighted_mean([(1.0, x)])
    assert torch.equal(total, x) and total.data_ptr() != x.data_ptr()
    total.zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("parts", [[], [(1.0, torch.zeros(1)), (1.0, torch.zeros(2))]])
def test_nothing_and_unequal_lengths_are_refused(parts):
    with pytest.raises(ValueError, match="vectors of one length"):
        weighted_mean(parts)


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 10**12), min_size=1),
    st.sampled_from(["tokens", "equal"]),
)
def test_multipliers_are_fp32_sorted_and_sum_to_one(tokens, weighting):
    shares = multipliers(tokens, weighting)
    assert list(shares) == sorted(tokens)
    assert all(float(np.float32(share)) == share for share in shares.values())
    assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
    if weighting == "tokens" and any(tokens.values()):
        assert shares == pytest.approx({s: n / sum(tokens.values()) for s, n in tokens.items()}, rel=1e-7)
    else:
        assert set(shares.values()) == {float(np.float32(1 / len(tokens)))}


def test_bad_weighting_and_negative_tokens_are_refused():
    with pytest.raises(ConfigError, match=r'outer.weighting \("loud"\)'):
        multipliers({"a": 1}, "loud")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProtocolError, match="site b offers -1 tokens"):
        multipliers({"a": 1, "b": -1}, "tokens")
