"""What may be said of an arm after several seeds: means and differences, each with its 95 % interval."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5 % quantiles of Student's t for 1 to 30 degrees of freedom."""


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


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to three digits; NaN for no degree of freedom."""
    if freedom < 1:
        return math.nan
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    # Cornish and Fisher's expansion, Abramowitz and Stegun 26.7.5
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


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
