"""What may be said of an arm after several seeds: means, differences and prices, each with its 95 % interval."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from composer_prime.bench.paired import t_quantile


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; low and high are NaN where nothing follows, as from one seed."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def is_clear(self) -> bool:
        """Whether the interval is known and leaves out zero."""
        return self.low > 0 or self.high < 0


def mean_interval(values: Sequence[float]) -> Estimate:
    """Mean of the values, at least one, with Student's t interval: mean +- t s / sqrt(n)."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def difference_interval(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Mean of the differences seed by seed, with its t interval."""
    return mean_interval([value - base for value, base in zip(values, baseline, strict=True)])


def ratio_interval(costs: Sequence[float], gains: Sequence[float]) -> Estimate | None:
    """Mean cost over mean gain, pairs from one seed each; None when the mean gain isn't above 0.

    The interval holds the ratios R for which the mean of cost - R gain can't be told from 0 (Fieller 1954): the roots
    of a quadratic. It has no end, and is NaN, while the gain itself can't be told from 0.
    """
    cost, gain = statistics.fmean(costs), statistics.fmean(gains)
    if gain <= 0:
        return None
    count = len(costs)
    if count == 1:
        return Estimate(cost / gain)
    scale = t_quantile(count - 1) ** 2 / count
    a = gain**2 - scale * statistics.variance(gains)
    b = cost * gain - scale * statistics.covariance(costs, gains)
    c = cost**2 - scale * statistics.variance(costs)
    if a <= 0:
        return Estimate(cost / gain)
    root = math.sqrt(max(b**2 - a * c, 0.0))
    return Estimate(cost / gain, (b - root) / a, (b + root) / a)
