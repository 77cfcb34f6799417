"""Tests of the distributions of burst sizes and gaps: means, bounds and seeds."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.bench.traffic.distributions import MAX_VALUE, Bursts, draw_value
from flagscale.bench.traffic.spec import DISTRIBUTIONS, Distribution, Pattern

# Tolerance of the mean of 60,000 values. That of a heavy-tailed Pareto distribution varies most.
MEAN_TOLERANCES = [("constant", 1e-9), ("exponential", 0.02), ("pareto", 0.06)]


@pytest.mark.parametrize(
    ("distribution", "tolerance"),
    MEAN_TOLERANCES,
    ids=[distribution for distribution, _ in MEAN_TOLERANCES],
)
def test_distributions_have_mean_1(distribution: Distribution, tolerance: float) -> None:
    generator = random.Random(7)
    assert abs(fmean(draw_value(distribution, generator) for _ in range(60_000)) - 1) < tolerance


@given(st.sampled_from(DISTRIBUTIONS), st.integers())
def test_distributions_are_bounded(distribution: Distribution, seed: int) -> None:
    generator = random.Random(seed)
    draws = [draw_value(distribution, generator) for _ in range(200)]
    assert all(0 < value <= MAX_VALUE[distribution] * (1 + 1e-9) for value in draws)


@settings(max_examples=40)
@given(
    st.sampled_from(DISTRIBUTIONS),
    st.sampled_from(DISTRIBUTIONS),
    st.floats(1e6, 1e11),
    st.floats(0.01, 0.9),
    st.integers(1 << 12, 1 << 24),
)
def test_load_matches_the_pattern(
    bursts: Distribution, gaps: Distribution, rate: float, load_fraction: float, burst: int
) -> None:
    pattern = Pattern(rate, load_fraction * rate, burst, bursts=bursts, gaps=gaps, seed=3)
    draws = list(islice(Bursts(pattern, 0), 6_000))
    load = 8 * sum(size for _, size in draws[:-1]) / (draws[-1][0] - draws[0][0])
    assert load == pytest.approx(pattern.load, rel=0.2 if "pareto" in (bursts, gaps) else 0.08)
    assert all(size <= MAX_VALUE[bursts] * burst + 1 for _, size in draws)
    times = [due for due, _ in draws]
    assert times == sorted(times)


def test_bursts_are_determined_by_seed_and_flow() -> None:
    pattern = Pattern(1e9, 5e7, 1 << 16, seed=5)

    def first_bursts(flow: int, seed: int = 5) -> list[tuple[float, int]]:
        return list(islice(Bursts(replace(pattern, seed=seed), flow), 50))

    assert first_bursts(1) == first_bursts(1)
    assert first_bursts(1) != first_bursts(2)
    assert first_bursts(1) != first_bursts(1, seed=6)


def test_mean_scales_the_bursts() -> None:
    """A new mean scales the drawn values, so that calibration does not change them otherwise."""
    pattern = Pattern(1e9, 5e7, 1 << 16)
    small, large = Bursts(pattern, 0), Bursts(replace(pattern, burst=1 << 18), 0)
    sizes = [(next(small)[1], next(large)[1]) for _ in range(100)]
    assert all(large == pytest.approx(4 * small, abs=4) for small, large in sizes)
