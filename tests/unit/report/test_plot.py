"""Tests of plots: lines, labels and the data for the pointer."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.report_lab import ParsedPage

from flagscale.report.plot import Level, Line, Mark, Plot, render_plot

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def _parse_plot(plot: Plot) -> tuple[ParsedPage, dict[str, Any]]:
    page = ParsedPage(render_plot(plot))
    assert page.open_tags == []
    ((kind, data),) = page.scripts
    assert kind == "application/json"
    return page, json.loads(data, parse_constant=pytest.fail)


def _paths(page: ParsedPage, class_: str) -> list[str]:
    return [path["d"] or "" for path in page.find_elements("path", class_=class_)]


def test_lines_span_the_plot_and_break_at_missing_values() -> None:
    line = Line("loss", [0, 5, 6, 10], [0.0, 10.0, math.nan, 10.0])
    page, data = _parse_plot(Plot("Loss", "nats", [line]))
    # A margin of 5% above and below; a single point is a line of length 0.
    assert _paths(page, "line c0") == ["M0 573l1000 -546M2000 27"]
    assert _paths(page, "line c0 dots") == ["M0 573h0M1000 27h0M2000 27h0"]
    assert data["lines"][0]["y"] == [0, 10, "NaN", 10]
    (svg,) = page.find_elements("svg")
    assert svg["role"] == "img"
    assert svg["aria-label"] == (
        "Loss, nats. loss: 0 at step 0, 10 at 10, lowest 0 at 0, highest 10 at 5"
    )
    assert "loss 10" in page.text, "the legend has the last value"


def test_segments_of_a_curve_share_a_legend_entry_and_a_table_column() -> None:
    segments = [Line("a", [1, 2], [3.0, 4.0]), Line("a", [3], [5.0])]
    superseded_line = Line("a in attempt 1", [3, 4], [7.0, 8.0], faint=True)
    page, data = _parse_plot(Plot("P", "u", [*segments, superseded_line]))
    assert len(page.find_elements("li")) == 1
    assert [line["faint"] for line in data["lines"]] == [False, False, True]
    assert len(_paths(page, "line c0 faint")) == 1
    assert len(page.find_elements("th")) == 2
    cells = [text for text in page.texts if text in "12345678"]
    assert "".join(cells[-6:]) == "132435", "step by step what counts"


def test_markers_at_one_position_are_merged_and_restarts_are_vertical_lines() -> None:
    marks = [Mark(step, "checkpoint", f"step {step}") for step in range(1, 1001)]
    marks += [Mark(500, "restart", "again"), Mark(500, "failure", 'why "<b>"', 1)]
    page, _ = _parse_plot(Plot("P", "u", [Line("a", range(1, 1001), [1.0] * 1000)], marks=marks))
    signs = page.find_elements("span", class_="mark checkpoint")
    assert len(signs) == 161
    assert re.fullmatch(r"\d: step \d+, …", signs[80]["title"] or "")
    assert page.find_elements("span", class_="mark failure")[0]["title"] == 'why "<b>"'
    assert (
        len(
            page.find_elements("path", class_="when restart")
            + page.find_elements("path", class_="when failure")
        )
        == 2
    )
    assert (
        len(
            page.find_elements("div", class_="marks c0")
            + page.find_elements("div", class_="marks c1")
        )
        == 2
    )


def test_sizes_over_times() -> None:
    ticks = [(1024, "1K"), (1 << 20, "1M")]
    lines = [Line("gloo", [1024, 1 << 20], [1.0, 8.0], dashed=True)]
    levels: list[Level] = [("peak", 16.0)]
    plot = Plot("busbw", "GB/s", lines, axis="bytes", x_log=True, x_ticks=ticks, levels=levels)
    page, data = _parse_plot(plot)
    assert _paths(page, "line c0 dashed dots") == ["M38 573h0M1962 318h0"]
    assert _paths(page, "level") == ["M0 27h2000"]
    assert (data["axis"], data["x"][2]) == ("bytes", True)
    assert "1,048,576" in page.text


@given(st.lists(st.tuples(st.integers(0, 10**6), NUMBERS), max_size=90), st.booleans())
def test_any_values_can_be_plotted(points: list[tuple[int, float]], dashed: bool) -> None:
    points.sort(key=lambda point: point[0])
    line = Line('"><x', [x for x, _ in points], [y for _, y in points], dashed=dashed)
    page, data = _parse_plot(Plot("P", "u", [line], max_points=20))
    assert not page.find_elements("x")
    path_data = " ".join(path["d"] or "" for path in page.find_elements("path"))
    assert not re.search(r"nan|inf|e", path_data)
    numbers = [int(n) for n in re.findall(r"M(-?\d+) ", path_data)]
    assert all(0 <= n <= 2000 for n in numbers)
    assert data["x"][0] < data["x"][1]
    assert data["y"][0] < data["y"][1]


def test_spread_is_a_band_within_the_axis() -> None:
    line = Line("a", [1, 2], [5.0, 6.0], 3, spread=[(0.0, 7.0), (2.0, 10.0)])
    markup = str(render_plot(Plot("t", "u", [line])))
    (band,) = re.findall(r'<path class="band c3" d="([^"]*)"', markup)
    points = re.findall(r"(\d+) (\d+)", band)
    assert [int(x) for x, _ in points] == [0, 2000, 2000, 0]
    # Along the lower ends and back along the upper ones; none is cut off.
    heights = [int(y) for _, y in points]
    assert heights[0] > heights[1] > heights[3] > heights[2] > 0
    assert "band" not in str(render_plot(Plot("t", "u", [Line("a", [1, 2], [5.0, 6.0])])))
