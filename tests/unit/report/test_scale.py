"""Tests of axes, ticks and the format of numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.report.scale import (
    Scale,
    fit_scale,
    format_number,
    format_short,
    is_drawable,
    sample_indices,
)

ANY = st.floats(allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"), (5.64484912, "5.6448"), (2685.8, "2,686"), (0.0000123456, "1.2346e-05"),
        (-1234.5, "-1,234"), (1e15, "1e+15"), (math.nan, "NaN"), (math.inf, "∞"), (-math.inf, "-∞"),
    ],
)  # fmt: skip
def test_numbers_are_formatted_briefly(value: float, expected: str) -> None:
    assert format_number(value) == expected


@pytest.mark.parametrize(
    ("scale", "max_ticks", "labels"),
    [
        pytest.param(Scale(0, 200), 6, ["0", "50", "100", "150", "200"], id="steps"),
        pytest.param(Scale(1, 100_000), 6, ["20k", "40k", "60k", "80k", "100k"], id="thousands"),
        pytest.param(Scale(900, 2600), 4, ["1k", "1.5k", "2k", "2.5k"], id="halves"),
        pytest.param(Scale(5.1, 5.4), 4, ["5.1", "5.2", "5.3", "5.4"], id="tenths"),
        pytest.param(Scale(-1, 1), 4, ["-1", "-0.5", "0", "0.5", "1"], id="around-zero"),
        pytest.param(Scale(0, 0.001), 5, ["0", "0.0002", "0.0004", "0.0006", "0.0008", "0.001"],
                     id="small"),
        pytest.param(Scale(1, 1000, log=True), 5, ["1", "10", "100", "1k"], id="decades"),
        pytest.param(Scale(1, 12, log=True), 5, ["1", "2", "5", "10"], id="one-decade"),
        pytest.param(Scale(6.1, 8.7, log=True), 5, ["6.1", "8.7"], id="within-a-decade"),
    ],
)  # fmt: skip
def test_ticks_have_round_labels(scale: Scale, max_ticks: int, labels: list[str]) -> None:
    assert [label for _, label in scale.ticks(max_ticks)] == labels


@given(st.lists(ANY, max_size=8), st.sampled_from([None, True, False]), st.sampled_from([0, 0.05]))
def test_drawable_values_lie_within_the_axis(
    values: list[float], log: bool | None, margin: float
) -> None:
    scale = fit_scale(values, log=log, margin=margin)
    assert scale.low < scale.high
    for value in filter(is_drawable, values):
        assert 0 <= scale.position(value) <= 1
        assert value <= scale.high
        assert value >= scale.low or (scale.log and value <= 1e-100)
    ticks = scale.ticks(5)
    assert all(scale.low <= value <= scale.high * (1 + 1e-9) for value, _ in ticks if value > 0)
    assert len(ticks) <= 12
    assert all(len(label) < 12 for _, label in ticks)


def test_widely_spread_values_get_a_logarithmic_axis() -> None:
    assert not fit_scale([1.0] * 20 + [9.0]).log
    assert fit_scale([1.0] * 20 + [90.0]).log
    assert not fit_scale([0.0] + [1.0] * 20 + [90.0]).log, "0 has no logarithm"


@given(st.integers(0, 3000), st.integers(2, 40))
def test_samples_include_both_ends(count: int, max_count: int) -> None:
    indices = list(sample_indices(count, max_count))
    assert indices == sorted(set(indices))
    assert len(indices) <= max_count
    assert not count or (indices[0], indices[-1]) == (0, count - 1)


@given(ANY)
def test_labels_are_short(value: float) -> None:
    assert len(format_short(value)) <= 10
