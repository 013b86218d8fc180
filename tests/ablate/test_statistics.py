"""Intervals against numbers worked out by hand, and against what defines them."""

import math

import pytest

from composer_prime.ablate.report import (
    Estimate,
    difference_interval,
    mean_interval,
    t_quantile,
)


def test_the_t_quantile_is_that_of_the_tables():
    assert t_quantile(4) == 2.776  # five pairs
    assert math.isnan(t_quantile(0))
    for freedom, known in ((40, 2.0211), (60, 2.0003), (120, 1.9799), (100_000, 1.9600)):
        assert t_quantile(freedom) == pytest.approx(known, abs=1e-4)
    quantiles = [t_quantile(freedom) for freedom in range(1, 60)]
    assert quantiles == sorted(quantiles, reverse=True)


def test_the_interval_of_a_mean_is_students():
    found = mean_interval([1.0, 2.0, 3.0, 4.0])  # s = sqrt(5/3), t(3) = 3.182: 3.182 * 1.29099 / 2 = 2.05397
    assert found.value == 2.5
    assert found.high - found.value == pytest.approx(2.05397, abs=1e-5)
    assert found.value - found.low == pytest.approx(2.05397, abs=1e-5)


def test_one_seed_gives_a_mean_and_no_interval():
    found = mean_interval([0.3])
    assert found.value == 0.3 and math.isnan(found.low) and math.isnan(found.high) and not found.is_clear


def test_differences_are_taken_seed_by_seed():
    found = difference_interval([1.1, 5.2, 9.3], [1.0, 5.0, 9.0])  # 0.1, 0.2, 0.3: 4.303 * 0.1 / sqrt(3) = 0.24843
    assert found.value == pytest.approx(0.2)
    assert found.high == pytest.approx(0.2 + 0.24843, abs=1e-5)
    assert not found.is_clear and Estimate(0.2, 0.1, 0.3).is_clear and Estimate(-0.2, -0.3, -0.1).is_clear


def test_a_difference_is_students_own():
    """Sleep gained with two drugs (Student 1908): ten pairs, mean 1.58, 95 % from 0.70 to 2.46, as R's t.test says."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    found = difference_interval([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4], first)
    assert [found.value, found.low, found.high] == pytest.approx([1.58, 0.7001, 2.4599], abs=1e-3)
    assert found.is_clear and not difference_interval([0.9, 0.8], [0.9, 0.8]).is_clear
    with pytest.raises(ValueError, match="zip"):
        difference_interval([0.9], [0.8, 0.7])
