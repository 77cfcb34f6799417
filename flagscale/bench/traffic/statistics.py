"""The ratio p99 ÷ p50 of samples that follow each other, and how well it is known. Needs numpy.

Operations that follow each other feel the same burst, so resampling them one by one would promise
too much: blocks of neighbours are drawn instead (Künsch 1989), each as long as the square root of
the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flagscale.bench.traffic.spec import Found

RESAMPLES = 600
CONFIDENCE = 0.95
_AT_ONCE = 50


def found(samples: Sequence[float], seed: int = 0) -> Found:
    """What so many samples (seconds, in their order; one at least) tell."""
    times = np.asarray(samples, dtype=np.float64)
    median, p99 = np.percentile(times, (50, 99))
    low, high = interval(times, seed)
    return Found(len(times), float(median), float(p99), float(p99 / median), low, high)


def interval(times: np.ndarray, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 % interval of p99 ÷ p50 by a bootstrap of blocks, which wrap around the end."""
    count = len(times)
    block = max(1, math.isqrt(count))
    blocks = -(-count // block)
    generator = np.random.default_rng(seed)
    ratios = []
    for first in range(0, resamples, _AT_ONCE):
        rows = min(_AT_ONCE, resamples - first)
        starts = generator.integers(count, size=(rows, blocks, 1))
        chosen = (starts + np.arange(block)).reshape(rows, -1)[:, :count] % count
        median, p99 = np.percentile(times[chosen], (50, 99), axis=1)
        ratios.append(p99 / median)
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(ratios), (outside, 1 - outside))
    return float(low), float(high)
