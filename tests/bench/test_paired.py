"""Paired differences against numbers of the books."""

import math

import pytest

from composer_prime.bench.paired import paired_difference, t_quantile


def test_the_t_quantile_is_that_of_the_tables() -> None:
    assert t_quantile(4) == 2.776  # five pairs
    assert math.isnan(t_quantile(0))
    for freedom, known in ((40, 2.0211), (60, 2.0003), (120, 1.9799), (100_000, 1.9600)):
        assert t_quantile(freedom) == pytest.approx(known, abs=1e-4)
    quantiles = [t_quantile(freedom) for freedom in range(1, 60)]
    assert quantiles == sorted(quantiles, reverse=True)


def test_a_paired_difference_is_students_own() -> None:
    """Sleep gained with two drugs (Student 1908): ten pairs, mean 1.58, 95 % from 0.70 to 2.46, as R's t.test says."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired_difference(second, first)
    assert found.mean == pytest.approx(1.58)
    assert found.mean - found.half_width == pytest.approx(0.7001, abs=1e-3)
    assert found.mean + found.half_width == pytest.approx(2.4599, abs=1e-3)
    assert found.is_clear


def test_one_pair_says_nothing_and_equal_pairs_are_not_clear() -> None:
    alone = paired_difference([0.9], [0.8])
    assert alone.mean == pytest.approx(0.1) and math.isnan(alone.half_width) and not alone.is_clear
    same = paired_difference([0.9, 0.8], [0.9, 0.8])
    assert (same.mean, same.half_width, same.is_clear) == (0.0, 0.0, False)


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_difference([0.9], [0.8, 0.7])
