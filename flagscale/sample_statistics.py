"""Percentiles of times, and the ratio of two samples of them with what is known of it."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_RESAMPLES = 1000


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks (numpy's default)."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Ratio:
    """The ratio of two times with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """``7.14 times as fast (6.2 to 8.1)``, or ``as long``; the interval in the same terms."""
        ends = (self.value, self.low, self.high)
        if self.value < 1:
            ends = (1 / self.value, 1 / self.high, 1 / self.low if self.low else math.inf)
        value, low, high = (f"{end:.3g}" for end in ends)
        return f"{value} times as {'fast' if self.value < 1 else 'long'} ({low} to {high})"

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 1: one of the two is faster."""
        return self.low > 1 or self.high < 1


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """The geometric mean of ``above[i] / below[i]`` and Student's 95 % interval of it.

    Pairs measured next to each other share what disturbs both, which is why they are divided
    before they are averaged.
    """
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    count = len(logs)
    mean = statistics.fmean(logs)
    if count < 2:
        return Ratio(math.exp(mean), 0.0, math.inf)
    half = _student95(count - 1) * statistics.stdev(logs) / math.sqrt(count)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def median_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """The ratio of two medians with a 95 % interval by the bootstrap over pairs.

    For times on a machine that does other work: what disturbs a few turns by a factor moves a
    mean and not a median.
    """
    draw = random.Random(0)
    pairs = list(zip(above, below, strict=True))
    if len(pairs) < 2:
        return Ratio(above[0] / below[0], 0.0, math.inf)
    found = sorted(
        statistics.median(a for a, _ in some) / statistics.median(b for _, b in some)
        for some in (draw.choices(pairs, k=len(pairs)) for _ in range(_RESAMPLES))
    )
    value = statistics.median(above) / statistics.median(below)
    return Ratio(value, found[_RESAMPLES // 40], found[-_RESAMPLES // 40 - 1])


# Two-sided 95 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def _student95(freedom: int) -> float:
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    # Cornish-Fisher expansion around the normal quantile; below 1e-4 off from 31 on.
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
