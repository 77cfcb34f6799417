"""Fewer points of the same look."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flagscale.report.scale import drawable
from flagscale.report.thin import thin

VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=400)


@given(VALUES, st.integers(4, 60))
def test_no_extreme_and_no_gap_is_lost(y: list[float], most: int) -> None:
    x = [float(i) for i in range(len(y))]
    kept_x, kept_y = thin(x, y, most)
    assert len(kept_x) == len(kept_y) <= 2 * most + 2
    assert kept_x == sorted(set(kept_x))
    assert all(y[int(at)] is value for at, value in zip(kept_x, kept_y, strict=True))
    assert kept_x[:1] == x[:1]
    assert kept_x[-1:] == x[-1:]
    fit, kept = list(filter(drawable, y)), list(filter(drawable, kept_y))
    assert (min(fit, default=0), max(fit, default=0)) == (
        min(kept, default=0),
        max(kept, default=0),
    )
    assert all(map(drawable, y)) == all(map(drawable, kept_y))


def test_a_spike_among_a_hundred_thousand_stays() -> None:
    y = [1.0] * 100_000
    y[54_321] = 7.0
    x, kept = thin(range(100_000), y, 2000)
    assert len(x) <= 2000
    assert (54_321, 7.0) in zip(x, kept, strict=True)


def test_few_points_are_all_kept() -> None:
    assert thin([1, 2, 3], [3.0, 2.0, 1.0], 4) == ([1, 2, 3], [3.0, 2.0, 1.0])
