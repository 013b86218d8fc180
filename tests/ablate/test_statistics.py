"""Intervals against numbers worked out by hand, and against what defines them."""

import math
import statistics

import pytest

from composer_prime.ablate.statistics import Estimate, difference_interval, mean_interval, ratio_interval
from composer_prime.bench.paired import t_quantile


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


def test_at_the_ends_of_a_ratios_interval_cost_minus_ratio_times_gain_is_just_clear():
    costs, gains = [100.0, 120.0, 90.0, 130.0], [10.0, 12.0, 11.0, 12.5]
    found = ratio_interval(costs, gains)
    assert found is not None and found.low < found.value < found.high
    assert found.value == pytest.approx(440 / 45.5)
    for end in (found.low, found.high):
        rest = [cost - end * gain for cost, gain in zip(costs, gains, strict=True)]
        t = statistics.fmean(rest) / (statistics.stdev(rest) / 2)
        assert abs(t) == pytest.approx(t_quantile(3), rel=1e-9)


def test_a_ratio_to_a_gain_that_may_be_nothing_has_no_interval_and_to_a_loss_no_value():
    unclear = ratio_interval([1.0, 1.0, 1.0], [-1.0, 1.0, 3.0])
    assert unclear is not None and unclear.value == 1.0 and math.isnan(unclear.high)
    assert ratio_interval([1.0, 1.0], [-1.0, -2.0]) is None
