"""What a plot draws, says and knows."""

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


def _read(plot: Plot) -> tuple[ParsedPage, dict[str, Any]]:
    read = ParsedPage(render_plot(plot))
    assert read.open == []
    ((kind, data),) = read.scripts
    assert kind == "application/json"
    return read, json.loads(data, parse_constant=pytest.fail)


def _paths(read: ParsedPage, class_: str) -> list[str]:
    return [path["d"] or "" for path in read.of("path", class_=class_)]


def test_lines_span_the_plot_and_break_at_missing_values() -> None:
    line = Line("loss", [0, 5, 6, 10], [0.0, 10.0, math.nan, 10.0])
    read, data = _read(Plot("Loss", "nats", [line]))
    # Five hundredths of room above and below; what stands alone is a line of no length.
    assert _paths(read, "line c0") == ["M0 573l1000 -546M2000 27"]
    assert _paths(read, "line c0 dots") == ["M0 573h0M1000 27h0M2000 27h0"]
    assert data["lines"][0]["y"] == [0, 10, "NaN", 10]
    (svg,) = read.of("svg")
    assert svg["role"] == "img"
    assert svg["aria-label"] == (
        "Loss, nats. loss: 0 at step 0, 10 at 10, lowest 0 at 0, highest 10 at 5"
    )
    assert "loss 10" in read.text, "the legend has the last value"


def test_segments_of_a_curve_share_a_legend_entry_and_a_table_column() -> None:
    pieces = [Line("a", [1, 2], [3.0, 4.0]), Line("a", [3], [5.0])]
    over = Line("a in attempt 1", [3, 4], [7.0, 8.0], faint=True)
    read, data = _read(Plot("P", "u", [*pieces, over]))
    assert len(read.of("li")) == 1
    assert [line["faint"] for line in data["lines"]] == [False, False, True]
    assert len(_paths(read, "line c0 faint")) == 1
    assert len(read.of("th")) == 2
    cells = [text for text in read.texts if text in "12345678"]
    assert "".join(cells[-6:]) == "132435", "step by step what counts"


def test_markers_at_one_position_are_merged_and_restarts_are_vertical_lines() -> None:
    marks = [Mark(step, "checkpoint", f"step {step}") for step in range(1, 1001)]
    marks += [Mark(500, "restart", "again"), Mark(500, "failure", 'why "<b>"', 1)]
    read, _ = _read(Plot("P", "u", [Line("a", range(1, 1001), [1.0] * 1000)], marks=marks))
    signs = read.of("span", class_="mark checkpoint")
    assert len(signs) == 161
    assert re.fullmatch(r"\d: step \d+, …", signs[80]["title"] or "")
    assert read.of("span", class_="mark failure")[0]["title"] == 'why "<b>"'
    assert len(read.of("path", class_="when restart") + read.of("path", class_="when failure")) == 2
    assert len(read.of("div", class_="marks c0") + read.of("div", class_="marks c1")) == 2


def test_sizes_over_times() -> None:
    ticks = [(1024, "1K"), (1 << 20, "1M")]
    lines = [Line("gloo", [1024, 1 << 20], [1.0, 8.0], dashed=True)]
    levels: list[Level] = [("peak", 16.0)]
    plot = Plot("busbw", "GB/s", lines, axis="bytes", x_log=True, x_ticks=ticks, levels=levels)
    read, data = _read(plot)
    assert _paths(read, "line c0 dashed dots") == ["M38 573h0M1962 318h0"]
    assert _paths(read, "level") == ["M0 27h2000"]
    assert (data["axis"], data["x"][2]) == ("bytes", True)
    assert "1,048,576" in read.text


@given(st.lists(st.tuples(st.integers(0, 10**6), NUMBERS), max_size=90), st.booleans())
def test_any_values_can_be_plotted(points: list[tuple[int, float]], dashed: bool) -> None:
    points.sort(key=lambda point: point[0])
    line = Line('"><x', [x for x, _ in points], [y for _, y in points], dashed=dashed)
    read, data = _read(Plot("P", "u", [line], points=20))
    assert not read.of("x")
    drawn = " ".join(path["d"] or "" for path in read.of("path"))
    assert not re.search(r"nan|inf|e", drawn)
    numbers = [int(n) for n in re.findall(r"M(-?\d+) ", drawn)]
    assert all(0 <= n <= 2000 for n in numbers)
    assert data["x"][0] < data["x"][1]
    assert data["y"][0] < data["y"][1]


def test_spread_is_a_band_within_the_axis() -> None:
    line = Line("a", [1, 2], [5.0, 6.0], 3, spread=[(0.0, 7.0), (2.0, 10.0)])
    drawn = str(render_plot(Plot("t", "u", [line])))
    (band,) = re.findall(r'<path class="band c3" d="([^"]*)"', drawn)
    points = re.findall(r"(\d+) (\d+)", band)
    assert [int(x) for x, _ in points] == [0, 2000, 2000, 0]
    # From the lower ends and back along the upper ones; none is cut off.
    heights = [int(y) for _, y in points]
    assert heights[0] > heights[1] > heights[3] > heights[2] > 0
    assert "band" not in str(render_plot(Plot("t", "u", [Line("a", [1, 2], [5.0, 6.0])])))
