"""Statistics of measured times: percentiles, ratios with confidence intervals, and the statistics
that a user can select by name. Standard library alone; :mod:`.bootstrap` needs numpy."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flagscale.errors import ConfigError

_RESAMPLES = 1000
_NAME_PATTERN = re.compile(r"avg|min|max|p(?:100|\d{1,2}(?:\.\d+)?)")
_MIN_TAIL_SAMPLES = 100
"""Number of iterations below which a 99th percentile is little more than the slowest one."""
# Two-sided 95 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation between the closest ranks (numpy's default)."""
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Ratio:
    """Ratio of two durations with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def description(self) -> str:
        """Description such as ``7.14 times as fast (6.2 to 8.1)`` or ``as long``, with the
        interval.
        """
        bounds = (self.value, self.low, self.high)
        if self.value < 1:
            bounds = (1 / self.value, 1 / self.high, 1 / self.low if self.low else math.inf)
        value, low, high = (f"{bound:.3g}" for bound in bounds)
        return f"{value} times as {'fast' if self.value < 1 else 'long'} ({low} to {high})"

    @property
    def is_significant(self) -> bool:
        """True if the interval excludes 1, so that one of the two is faster."""
        return self.low > 1 or self.high < 1


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the geometric mean of the pairs' ratios with Student's 95 % interval.

    Disturbances affect both members of a pair that was measured back to back. Therefore pairs
    are divided before they are averaged.
    """
    logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]
    count = len(logs)
    mean = statistics.fmean(logs)
    if count < 2:
        return Ratio(math.exp(mean), 0.0, math.inf)
    half_width = _student_quantile(count - 1) * statistics.stdev(logs) / math.sqrt(count)
    return Ratio(math.exp(mean), math.exp(mean - half_width), math.exp(mean + half_width))


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the ratio of two medians with a 95 % interval from the bootstrap over pairs.

    Use it on a machine with other load: a disturbance of a few samples by a large factor moves a
    mean but not a median.
    """
    generator = random.Random(0)
    pairs = list(zip(numerators, denominators, strict=True))
    if len(pairs) < 2:
        return Ratio(numerators[0] / denominators[0], 0.0, math.inf)
    ratios = sorted(
        statistics.median(a for a, _ in resample) / statistics.median(b for _, b in resample)
        for resample in (generator.choices(pairs, k=len(pairs)) for _ in range(_RESAMPLES))
    )
    value = statistics.median(numerators) / statistics.median(denominators)
    return Ratio(value, ratios[_RESAMPLES // 40], ratios[-_RESAMPLES // 40 - 1])


def _student_quantile(degrees: int) -> float:
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    # Cornish-Fisher expansion around the normal quantile. Its error is below 1e-4 from 31 on.
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


@dataclass(frozen=True)
class Statistic:
    """A statistic that a user selects: ``avg``, ``min``, ``max``, a percentile such as ``p50``, or
    a ratio such as ``p99/p50``."""

    name: str

    @property
    def heading(self) -> str:
        """Name of its column in a table and of its key in a JSON file."""
        return self.name if "/" in self.name else f"time:{self.name}(us)"

    def value(self, average: float, samples: Sequence[float]) -> float:
        """Return the statistic in the unit of its arguments; a ratio has no unit.

        Args:
            average: the reported mean.
            samples: for each iteration the longest time over the ranks, in any order.
        """
        if "/" in self.name:
            numerator, _, denominator = self.name.partition("/")
            divisor = Statistic(denominator).value(average, samples)
            return Statistic(numerator).value(average, samples) / divisor if divisor else math.nan
        if self.name == "avg":
            return average
        if not samples:
            return math.nan
        if self.name in ("min", "max"):
            return min(samples) if self.name == "min" else max(samples)
        return percentile(samples, float(self.name[1:]))


def is_statistic(name: str) -> bool:
    """Return whether :class:`Statistic` supports this name."""
    return all(_NAME_PATTERN.fullmatch(part) for part in name.split("/")) and name.count("/") <= 1


def parse_statistics(names: Sequence[str]) -> tuple[Statistic, ...]:
    """Return the statistics with these names, each once.

    Raises:
        ConfigError: a name is unknown, or there is none.
    """
    if not names:
        raise ConfigError("-t/--stats needs at least one of avg, min, max, p50, p99/p50 ...")
    for name in names:
        if not is_statistic(name):
            supported = "avg, min, max, a percentile such as p50, or a ratio such as p99/p50"
            raise ConfigError(f"-t/--stats {name!r} is not known; expected {supported}")
    return tuple(Statistic(name) for name in dict.fromkeys(names))


def warn_about_few_samples(selected: Sequence[Statistic], samples: int) -> str | None:
    """Return a note for the user if a high percentile is selected and there are too few samples for
    it.
    """
    high_percentiles = [s.name for s in selected if re.search(r"p99|p9[5-8]\.|p100", s.name)]
    if not high_percentiles or samples >= _MIN_TAIL_SAMPLES:
        return None
    names = ", ".join(high_percentiles)
    return f"{names} of {samples} iterations: increase -n to at least {_MIN_TAIL_SAMPLES}"
