"""Decision which of many rates of equal devices are too low. Pure functions, standard library
alone.

Let m be the median of n rates. The spread of the healthy ones is estimated from the median absolute
deviation, which up to half of the values cannot distort:

    s = 1.4826 * b(n) * median(|x_i - m|) / m

1.4826 makes it a standard deviation for normal noise (Rousseeuw and Croux, "Alternatives to the
Median Absolute Deviation", 1993). b(n) corrects it for small n (Croux and Rousseeuw,
"Time-Efficient Algorithms for Two Highly Robust Estimators of Scale", 1992). A rate is too low if

    1 - x_i / m > max(0.10, 3.5 * s)

3.5 is the limit of the modified z-score (Iglewicz and Hoaglin, "How to Detect and Handle
Outliers", 1993). Devices of one product differ by a few percent, sick ones by 10 to 50 %, therefore
the floor of 10 %. If 3.5 s exceeds 20 %, the rates differ too much for a decision, and none is
called too low.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FLOOR = 0.10
"""Smallest shortfall that can be too low, as a fraction of the median."""
DETECTABLE = 0.20
"""Shortfall that must be detected, or nothing is decided."""
MIN_COUNT = 4
"""Smallest number of equal devices. Among fewer it is unclear which of them are healthy."""
_CUTOFF = 3.5
NORMAL_CONSISTENCY = 1.4826
"""Standard deviation of normal noise, as a multiple of the median absolute deviation."""
_SMALL_SAMPLE = (1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107)
"""b(n) for n from 2 to 9; n / (n - 0.8) above."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of equal devices by one rate."""

    count: int
    median: float
    lowest: float
    highest: float
    threshold: float
    """Shortfall from the median, as a fraction of it, from which on a rate is too low."""

    @property
    def is_decidable(self) -> bool:
        """True if a rate that is 20 % too low would be detected."""
        return self.count >= MIN_COUNT and self.threshold <= DETECTABLE

    def shortfall(self, rate: float) -> float:
        """Return the difference from the median as a fraction of it; negative above it."""
        return 1 - rate / self.median

    def is_slow(self, rate: float) -> bool:
        """Return True if the rate is too low; always False if nothing can be decided."""
        return self.is_decidable and self.shortfall(rate) > self.threshold


def compare_rates(rates: Sequence[float]) -> Comparison:
    """Compare the rates, at least one and all above 0, of equal devices."""
    threshold = max(FLOOR, noise_limit(rates))
    return Comparison(len(rates), statistics.median(rates), min(rates), max(rates), threshold)


def noise_limit(values: Sequence[float]) -> float:
    """Return the largest usual deviation from the median of values above 0, as a fraction of it:
    3.5 s.
    """
    median = statistics.median(values)
    deviation = statistics.median(abs(value - median) for value in values)
    spread = NORMAL_CONSISTENCY * _correct_small_sample(len(values)) * deviation / median
    return _CUTOFF * spread


def _correct_small_sample(count: int) -> float:
    if count < 2:
        return 1.0
    return _SMALL_SAMPLE[count - 2] if count <= 9 else count / (count - 0.8)
