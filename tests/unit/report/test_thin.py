"""Tests of thinning points without a visible change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flagscale.report.scale import is_drawable
from flagscale.report.thin import thin_points

VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=400)


@given(VALUES, st.integers(4, 60))
def test_extremes_and_gaps_are_preserved(y: list[float], max_points: int) -> None:
    x = [float(i) for i in range(len(y))]
    kept_x, kept_y = thin_points(x, y, max_points)
    assert len(kept_x) == len(kept_y) <= 2 * max_points + 2
    assert kept_x == sorted(set(kept_x))
    assert all(y[int(at)] is value for at, value in zip(kept_x, kept_y, strict=True))
    assert kept_x[:1] == x[:1]
    assert kept_x[-1:] == x[-1:]
    fit, kept_values = list(filter(is_drawable, y)), list(filter(is_drawable, kept_y))
    assert (min(fit, default=0), max(fit, default=0)) == (
        min(kept_values, default=0),
        max(kept_values, default=0),
    )
    assert all(map(is_drawable, y)) == all(map(is_drawable, kept_y))


def test_single_spike_among_100_000_points_is_preserved() -> None:
    y = [1.0] * 100_000
    y[54_321] = 7.0
    x, kept_values = thin_points(range(100_000), y, 2000)
    assert len(x) <= 2000
    assert (54_321, 7.0) in zip(x, kept_values, strict=True)


def test_few_points_are_all_preserved() -> None:
    assert thin_points([1, 2, 3], [3.0, 2.0, 1.0], 4) == ([1, 2, 3], [3.0, 2.0, 1.0])
