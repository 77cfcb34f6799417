"""Bootstrap confidence intervals for statistics of samples that are not independent.

Needs numpy; :mod:`.statistics` does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from flagscale.bench.statistics import Ratio

_TAIL_RESAMPLES = 600
_ROUND_RESAMPLES = 1000
_CONFIDENCE = 0.95
_RESAMPLE_BATCH = 50
"""Resamples that are drawn and evaluated at a time, to bound the memory."""


def tail_ratio_interval(
    times: np.ndarray, seed: int = 0, resamples: int = _TAIL_RESAMPLES
) -> tuple[float, float]:
    """Return the 95 % interval of p99 ÷ p50 of consecutive samples.

    Consecutive operations meet the same burst, so resampling them one by one would give too narrow
    an interval. Blocks of neighbours are drawn instead (Künsch 1989), each as long as the square
    root of the number of samples, and wrapping around the end.

    Args:
        times: samples in their order, shape (count,).
        seed: seed of the resampling.
        resamples: number of bootstrap resamples.
    """
    count = len(times)
    block_length = max(1, math.isqrt(count))
    block_count = -(-count // block_length)
    generator = np.random.default_rng(seed)
    ratios = []
    for batch_start in range(0, resamples, _RESAMPLE_BATCH):
        rows = min(_RESAMPLE_BATCH, resamples - batch_start)
        starts = generator.integers(count, size=(rows, block_count, 1))
        indices = (starts + np.arange(block_length)).reshape(rows, -1)[:, :count] % count
        median, p99 = np.percentile(times[indices], (50, 99), axis=1)
        ratios.append(p99 / median)
    tail_probability = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(ratios), (tail_probability, 1 - tail_probability))
    return float(low), float(high)


def group_by_round(values: Sequence[float], rounds: Sequence[int]) -> list[list[float]]:
    """Return the values of steps as one list per round."""
    pairs = zip(rounds, values, strict=True)
    return [
        [value for _, value in round_pairs] for _, round_pairs in groupby(pairs, key=itemgetter(0))
    ]


def percentile_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    rounds: Sequence[int],
    percent: float = 50.0,
    *,
    seed: int = 0,
) -> Ratio:
    """Return the ratio of two percentiles with a 95 % interval by the bootstrap over rounds.

    Rounds are drawn whole, and the same ones for both: consecutive steps share their disturbances,
    so that drawing steps one by one would give too narrow an interval. With a single round steps
    are drawn, and the interval is too narrow by their common disturbance.

    Args:
        numerators: times of the steps under one condition.
        denominators: times of the same steps under the other.
        rounds: round of each step, in ascending order.
        percent: percentile to compare.
        seed: seed of the resampling.
    """
    value = float(np.percentile(numerators, percent) / np.percentile(denominators, percent))
    numerator_rounds, denominator_rounds = (
        group_by_round(numerators, rounds),
        group_by_round(denominators, rounds),
    )
    if len(numerator_rounds) == 1:
        numerator_rounds, denominator_rounds = (
            [[x] for x in numerator_rounds[0]],
            [[x] for x in denominator_rounds[0]],
        )
    if len(numerator_rounds) < 2:
        return Ratio(value, 0.0, math.inf)
    generator = np.random.default_rng(seed)
    numerator_arrays, denominator_arrays = (
        [np.asarray(values) for values in lists] for lists in (numerator_rounds, denominator_rounds)
    )
    ratios = []
    for indices in generator.integers(
        len(numerator_rounds), size=(_ROUND_RESAMPLES, len(numerator_rounds))
    ):
        numerator = np.percentile(np.concatenate([numerator_arrays[i] for i in indices]), percent)
        denominator = np.percentile(
            np.concatenate([denominator_arrays[i] for i in indices]), percent
        )
        ratios.append(numerator / denominator)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return Ratio(value, float(low), float(high))
