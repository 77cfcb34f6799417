"""What bursts and gaps are drawn: their means, their bounds, their seeds."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.bench.traffic.distributions import LARGEST, Bursts, draw_value
from flagscale.bench.traffic.spec import DISTRIBUTIONS, Distribution, Pattern

# A Pareto law's mean of many draws is far off now and then, as is its nature.
MEANS = [("constant", 1e-9), ("exponential", 0.02), ("pareto", 0.06)]


@pytest.mark.parametrize(("law", "error"), MEANS, ids=[law for law, _ in MEANS])
def test_distributions_have_mean_1(law: Distribution, error: float) -> None:
    source = random.Random(7)
    assert abs(fmean(draw_value(law, source) for _ in range(60_000)) - 1) < error


@given(st.sampled_from(DISTRIBUTIONS), st.integers())
def test_distributions_are_bounded(law: Distribution, seed: int) -> None:
    source = random.Random(seed)
    drawn = [draw_value(law, source) for _ in range(200)]
    assert all(0 < value <= LARGEST[law] * (1 + 1e-9) for value in drawn)


@settings(max_examples=40)
@given(
    st.sampled_from(DISTRIBUTIONS),
    st.sampled_from(DISTRIBUTIONS),
    st.floats(1e6, 1e11),
    st.floats(0.01, 0.9),
    st.integers(1 << 12, 1 << 24),
)
def test_load_matches_the_pattern(
    bursts: Distribution, gaps: Distribution, rate: float, share: float, burst: int
) -> None:
    pattern = Pattern(rate, share * rate, burst, bursts=bursts, gaps=gaps, seed=3)
    drawn = list(islice(Bursts(pattern, 0), 6_000))
    load = 8 * sum(size for _, size in drawn[:-1]) / (drawn[-1][0] - drawn[0][0])
    assert load == pytest.approx(pattern.load, rel=0.2 if "pareto" in (bursts, gaps) else 0.08)
    assert all(size <= LARGEST[bursts] * burst + 1 for _, size in drawn)
    times = [due for due, _ in drawn]
    assert times == sorted(times)


def test_bursts_are_determined_by_seed_and_flow() -> None:
    pattern = Pattern(1e9, 5e7, 1 << 16, seed=5)

    def of(flow: int, seed: int = 5) -> list[tuple[float, int]]:
        return list(islice(Bursts(replace(pattern, seed=seed), flow), 50))

    assert of(1) == of(1)
    assert of(1) != of(2)
    assert of(1) != of(1, seed=6)


def test_mean_scales_the_bursts() -> None:
    """So steering does not play dice anew."""
    pattern = Pattern(1e9, 5e7, 1 << 16)
    small, large = Bursts(pattern, 0), Bursts(replace(pattern, burst=1 << 18), 0)
    sizes = [(next(small)[1], next(large)[1]) for _ in range(100)]
    assert all(large == pytest.approx(4 * small, abs=4) for small, large in sizes)
