"""Summary of the probe's samples. Needs numpy, so hosts do not import it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flagscale.bench.bootstrap import tail_ratio_interval
from flagscale.bench.traffic.spec import ProbeResult


def summarize(samples: Sequence[float], seed: int = 0) -> ProbeResult:
    """Return median, p99, and their ratio with its 95 % interval.

    Args:
        samples: seconds of consecutive operations in their order, at least one.
        seed: seed of the bootstrap.
    """
    times = np.asarray(samples, dtype=np.float64)
    median, p99 = np.percentile(times, (50, 99))
    low, high = tail_ratio_interval(times, seed)
    return ProbeResult(len(times), float(median), float(p99), float(p99 / median), low, high)
