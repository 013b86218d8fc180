"""Means of paired differences with their 95 % t interval: what may be said of two variants that met the same seeds."""

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
class Difference:
    """mean +- half_width is the 95 % interval; the width is NaN for one pair, from which nothing follows."""

    mean: float
    half_width: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return abs(self.mean) > self.half_width


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to three digits; NaN for no degree of freedom."""
    if freedom < 1:
        return math.nan
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    # Cornish and Fisher's expansion, Abramowitz and Stegun 26.7.5
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """How much larger `values` are than `baseline`, each pair from one seed. At least one pair."""
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    count = len(differences)
    if count == 1:
        return Difference(differences[0], math.nan)
    half_width = t_quantile(count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return Difference(statistics.mean(differences), half_width)
