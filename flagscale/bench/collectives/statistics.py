"""Latency statistics: which ones can be asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from flagscale.errors import ConfigError
from flagscale.sample_statistics import percentile

_NAME = re.compile(r"avg|min|max|p(?:100|\d{1,2}(?:\.\d+)?)")
_FEW = 100
"""Below so many iterations a 99th percentile is little more than the worst one."""


@dataclass(frozen=True)
class Statistic:
    """``avg``, ``min``, ``max``, a percentile such as ``p50``, or a ratio such as ``p99/p50``."""

    name: str

    @property
    def heading(self) -> str:
        """The column's name in a table and a JSON file."""
        return self.name if "/" in self.name else f"time:{self.name}(us)"

    def value(self, average: float, samples: Sequence[float]) -> float:
        """The statistic in the unit of its arguments (a ratio has none).

        ``average`` is the reported mean; ``samples`` are the iterations' times, of each the
        longest over the ranks, in any order.
        """
        if "/" in self.name:
            above, _, below = self.name.partition("/")
            divisor = Statistic(below).value(average, samples)
            return Statistic(above).value(average, samples) / divisor if divisor else math.nan
        if self.name == "avg":
            return average
        if not samples:
            return math.nan
        if self.name in ("min", "max"):
            return min(samples) if self.name == "min" else max(samples)
        return percentile(samples, float(self.name[1:]))


def is_statistic(name: str) -> bool:
    """Whether ``name`` is a statistic that can be asked for."""
    return all(_NAME.fullmatch(part) for part in name.split("/")) and name.count("/") <= 1


def parse_statistics(names: Sequence[str]) -> tuple[Statistic, ...]:
    """The statistics called ``names``.

    Raises:
        ConfigError: one of them is unknown, or none is given.
    """
    if not names:
        raise ConfigError("-t/--stats needs at least one of avg, min, max, p50, p99/p50 ...")
    for name in names:
        if not is_statistic(name):
            known = "avg, min, max, a percentile such as p50, or a ratio such as p99/p50"
            raise ConfigError(f"-t/--stats {name!r} is not known; expected {known}")
    return tuple(Statistic(name) for name in dict.fromkeys(names))


def warning(statistics: Sequence[Statistic], samples: int) -> str | None:
    """What to say when so few ``samples`` carry a high percentile."""
    high = [s.name for s in statistics if re.search(r"p99|p9[5-8]\.|p100", s.name)]
    if not high or samples >= _FEW:
        return None
    return f"{', '.join(high)} of {samples} iterations: ask for at least {_FEW} with -n"
