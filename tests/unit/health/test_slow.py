"""Tests of the decision which rates are too low, on measured and on generated rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.health.slow import DETECTABLE, FLOOR, MIN_COUNT, compare_rates

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results" / "health-4xh200.json"
MEASURED: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["results"]
COMPARED = [rates for rates in MEASURED if "all GPUs at once" not in rates["check"]]
NOISE = 0.0125
"""Largest difference of a healthy device from the typical one."""

FACTORS = st.floats(1 - NOISE, 1 + NOISE)
HEALTHY = st.lists(FACTORS, min_size=MIN_COUNT, max_size=64)


@st.composite
def _hosts_with_some_slow(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """Return the noise of healthy devices and of slow ones, at most a quarter of all."""
    healthy = draw(st.lists(FACTORS, min_size=3, max_size=48))
    slow = draw(st.lists(FACTORS, min_size=1, max_size=max(1, len(healthy) // 3)))
    return healthy, slow


def test_assumed_noise_exceeds_the_measured_one() -> None:
    for rates in COMPARED:
        for values in rates["rounds"]:
            assert max(values) / min(values) < (1 + NOISE) / (1 - NOISE)


@given(HEALTHY, st.floats(1e-3, 1e6))
def test_no_healthy_device_is_slow(factors: list[float], rate: float) -> None:
    comparison = compare_rates([rate * factor for factor in factors])
    assert comparison.is_decidable
    assert not any(comparison.is_slow(rate * factor) for factor in factors)


@given(_hosts_with_some_slow(), st.floats(1e-3, 1e6), st.floats(0.2, 0.95))
def test_every_device_that_is_20_percent_slow_is_detected(
    factors: tuple[list[float], list[float]], rate: float, loss: float
) -> None:
    healthy = [rate * factor for factor in factors[0]]
    slow = [rate * (1 - loss) * factor for factor in factors[1]]
    comparison = compare_rates([*slow, *healthy])
    assert not any(comparison.is_slow(value) for value in healthy)
    assert all(comparison.is_slow(value) for value in slow)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40))
def test_most_devices_are_never_slow(rates: list[float]) -> None:
    comparison = compare_rates(rates)
    assert 2 * sum(map(comparison.is_slow, rates)) <= len(rates)
    assert comparison.threshold >= FLOOR


@pytest.mark.parametrize("rates", COMPARED, ids=[rates["check"] for rates in COMPARED])
def test_recorded_healthy_gpus_are_not_slow_and_a_slowed_one_is(rates: dict[str, Any]) -> None:
    for values in rates["rounds"]:
        comparison = compare_rates(values)
        assert comparison.is_decidable
        assert not any(map(comparison.is_slow, values))
        for victim in range(len(values)):
            slowed = [v * (0.8 if i == victim else 1) for i, v in enumerate(values)]
            flagged = [compare_rates(slowed).is_slow(value) for value in slowed]
            assert flagged == [i == victim for i in range(len(values))]


def test_recorded_copies_that_disturb_each_other_are_not_slow() -> None:
    (rates,) = (rates for rates in MEASURED if rates not in COMPARED)
    for values in rates["rounds"]:
        assert not any(map(compare_rates(values).is_slow, values))


@pytest.mark.parametrize(
    ("rates", "decidable"),
    [
        pytest.param([100.0], False, id="one"),
        pytest.param([100.0, 80.0], False, id="two"),
        pytest.param([100.0, 100.0, 80.0], False, id="three"),
        pytest.param([100.0, 100.0, 100.0, 80.0], True, id="four"),
        pytest.param([100.0] * 8 + [80.0] * 8, False, id="two hosts of eight"),
        pytest.param([100.0, 92.0, 84.0, 76.0, 110.0], False, id="busy machine"),
    ],
)
def test_decidable_only_with_enough_equal_devices(rates: list[float], decidable: bool) -> None:
    comparison = compare_rates(rates)
    assert comparison.is_decidable == decidable
    assert comparison.is_slow(min(rates)) == decidable


def test_threshold_is_that_of_the_documented_formula() -> None:
    comparison = compare_rates([96.0, 98.0, 100.0, 102.0, 104.0])
    # The median deviation is 2, b(5) = 1.206.
    assert comparison.threshold == pytest.approx(3.5 * 1.4826 * 1.206 * 0.02)
    wide = compare_rates([90.0, 95.0, 100.0, 105.0, 110.0] * 4)
    assert wide.threshold == pytest.approx(3.5 * 1.4826 * 20 / 19.2 * 0.05)
    assert wide.threshold > DETECTABLE
