"""Plot of lines over one axis, as HTML; used by the pages of runs and of benchmarks.

Lines are SVG; labels are text next to it, so that they are readable at any width. The values are
also available as a table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from operator import itemgetter

from flagscale.report.html import Html, details, element, join_parts, table
from flagscale.report.scale import (
    Scale,
    Tick,
    fit_scale,
    format_number,
    is_drawable,
    sample_indices,
)
from flagscale.report.thin import thin_points

_WIDTH, _HEIGHT = 2000, 600
"""Size of the drawing's coordinate system; the page stretches it."""
_Y_TICKS, _X_TICKS = 5, 6
_MARK_POSITIONS = 160
_MAX_TABLE_ROWS = 14
COLOURS = 8
"""Size of the page's palette."""
_MAX_DOTTED_POINTS = 30
"""Curves with at most this many points show each point as a dot."""
SIGNS = {
    "checkpoint": "●",
    "restart": "▲",
    "stop": "■",
    "resume": "▶",
    "change": "▷",
    "spike": "◆",
    "failure": "✕",
}
MARKS = {
    "checkpoint": "a checkpoint was saved",
    "restart": "the job was started again",
    "stop": "the run was stopped",
    "resume": "the next run of the directory",
    "change": "the next run, with another configuration",
    "spike": "a spike, or a value that is no number",
    "failure": "the first failure",
}
"""Kinds of marks and their meanings."""
_LINE_MARKS = ("restart", "resume", "change", "failure")
"""Kinds of marks that are vertical lines in the plot."""


Level = tuple[str, float]
"""Horizontal line: name and value."""


@dataclass(frozen=True)
class Line:
    """Values over an axis: ``x`` ascending, ``y`` with equal length.

    Lines with one ``label`` are segments of one curve. ``colour`` is an index of the page's
    palette. ``faint`` lines are superseded by later ones; ``dashed`` ones are validation losses or
    imported results. A line with ``spread`` is drawn with a band and never thinned.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dashed: bool = False
    faint: bool = False
    spread: Sequence[tuple[float, float]] = ()
    """Lower and upper end of each value, if known."""


@dataclass(frozen=True)
class Mark:
    """Event at ``x``. ``kind`` is a key of :data:`MARKS`; ``row`` is the row of marks below the
    plot, from 0.
    """

    x: float
    kind: str
    title: str
    row: int = 0


@dataclass(frozen=True)
class Plot:
    """Lines that are drawn together.

    ``levels`` are horizontal lines. ``max_points`` is the approximate number of points drawn per
    line. ``x_log`` and ``y_log`` select logarithmic axes; None chooses by the values. Plots of one
    ``group`` share their ``x`` and their cursor.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    axis: str = "step"
    marks: Sequence[Mark] = ()
    levels: Sequence[Level] = ()
    x_log: bool = False
    y_log: bool | None = None
    x_ticks: Sequence[Tick] | None = None
    x_range: tuple[float, float] | None = None
    max_points: int = 2000
    group: str = ""


def render_plot(plot: Plot) -> Html:
    """Render the plot, its legend, the data for keyboard and pointer, and a table of values."""
    lines = [_thin_line(line, plot.max_points) for line in plot.lines if len(line.x)]
    plot = replace(plot, lines=lines)
    x_values = plot.x_range or tuple(chain.from_iterable((line.x[0], line.x[-1]) for line in lines))
    x_scale = fit_scale(x_values, log=plot.x_log, margin=0.02 if plot.x_log else 0.0)
    values = chain(
        (v for line in lines for v in (*line.y, *chain.from_iterable(line.spread))),
        (value for _, value in plot.levels),
    )
    y_scale = fit_scale(values, log=plot.y_log, margin=0.05)
    drawing = element(
        "div",
        _draw_svg(plot, x_scale, y_scale),
        element("i", class_="cross", hidden=True),
        element("output", class_="tip", hidden=True),
        _draw_marks(plot, x_scale),
        class_="field",
    )
    area = element(
        "div",
        element(
            "div",
            *_tick_labels(y_scale.ticks(_Y_TICKS), y_scale, "bottom"),
            class_="y",
            aria_hidden="true",
        ),
        drawing,
        element("div", *_tick_labels(_choose_x_ticks(plot, x_scale), x_scale, "left"), class_="x",
                aria_hidden="true"),
        class_="area", tabindex=0, role="group",
        aria_label=f"{plot.title}: arrow keys go from value to value",
    )  # fmt: skip
    unit = ", ".join(filter(None, (plot.unit, "log scale" if y_scale.log else "")))
    caption = element(
        "figcaption",
        element("h3", plot.title, " ", element("small", unit)),
        _make_legend(plot),
    )
    return element(
        "figure", caption, area, details("values", _value_table(plot)),
        _script_data(plot, x_scale, y_scale), class_="plot", data_group=plot.group or None,
    )  # fmt: skip


def _thin_line(line: Line, max_points: int) -> Line:
    if line.spread:
        return line
    x, y = thin_points(line.x, line.y, max_points)
    return replace(line, x=x, y=y)


def _choose_x_ticks(plot: Plot, x_scale: Scale) -> Sequence[Tick]:
    return x_scale.ticks(_X_TICKS) if plot.x_ticks is None else plot.x_ticks


def _tick_labels(ticks: Sequence[Tick], scale: Scale, side: str) -> Iterator[Html]:
    for value, label in ticks:
        yield element("span", label, style=f"{side}:{100 * scale.position(value):.2f}%")


def _draw_svg(plot: Plot, x_scale: Scale, y_scale: Scale) -> Html:
    grid = [
        f"M0 {_to_svg_y(y_scale.position(value))}h{_WIDTH}" for value, _ in y_scale.ticks(_Y_TICKS)
    ]
    grid += [
        f"M{_to_svg_x(x_scale.position(value))} 0v{_HEIGHT}"
        for value, _ in _choose_x_ticks(plot, x_scale)
    ]
    levels = "".join(
        f"M0 {_to_svg_y(y_scale.position(value))}h{_WIDTH}" for _, value in plot.levels
    )
    parts = [element("path", class_="grid", d="".join(grid))]
    parts += [element("path", class_="level", d=levels)] if levels else []
    for mark in (mark for mark in plot.marks if mark.kind in _LINE_MARKS):
        x = _to_svg_x(x_scale.position(mark.x))
        parts.append(element("path", class_=f"when {mark.kind}", d=f"M{x} 0v{_HEIGHT}"))
    curves = _group_by_label(plot)
    for line in (line for line in plot.lines if line.spread):
        parts.append(
            element("path", class_=f"band c{line.colour}", d=_band_path(line, x_scale, y_scale))
        )
    for line in plot.lines:
        classes = f"line c{line.colour}{' dashed' * line.dashed}{' faint' * line.faint}"
        has_dots = (
            not line.faint
            and sum(len(piece.x) for piece in curves[line.label]) <= _MAX_DOTTED_POINTS
        )
        path, dots = _line_paths(line, x_scale, y_scale, has_dots=has_dots)
        parts.append(element("path", class_=classes, d=path))
        if dots:
            parts.append(element("path", class_=f"{classes} dots", d=dots))
    return element(
        "svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", preserveAspectRatio="none", role="img",
        aria_label=_describe_plot(plot),
    )  # fmt: skip


def _to_svg_x(fraction: float) -> int:
    return round(fraction * _WIDTH)


def _to_svg_y(fraction: float) -> int:
    return round((1 - fraction) * _HEIGHT)


def _line_paths(line: Line, x_scale: Scale, y_scale: Scale, *, has_dots: bool) -> tuple[str, str]:
    """Return the path of a line, and the path of its dots.

    The line is broken where a value cannot be drawn. Points get dots if they are few or isolated.
    """
    segments: list[list[tuple[int, int]]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if is_drawable(y) and not (y_scale.log and y <= 0):
            segments[-1].append((_to_svg_x(x_scale.position(x)), _to_svg_y(y_scale.position(y))))
        elif segments[-1]:
            segments.append([])
    segments = [piece for piece in segments if piece]
    path_segments = (
        f"M{piece[0][0]} {piece[0][1]}"
        + "".join(f"l{c - a} {d - b}" for (a, b), (c, d) in pairwise(piece))
        for piece in segments
    )
    dots = (f"M{x} {y}h0" for piece in segments for x, y in piece if has_dots or len(piece) == 1)
    return "".join(path_segments), "".join(dots)


def _band_path(line: Line, x_scale: Scale, y_scale: Scale) -> str:
    """Return the area between the lower and upper ends of a line's values."""
    x_positions = [_to_svg_x(x_scale.position(x)) for x in line.x]
    lows, highs = (
        [_to_svg_y(y_scale.position(end)) for end in ends]
        for ends in zip(*line.spread, strict=True)
    )
    outline = [
        *zip(x_positions, lows, strict=True),
        *reversed([*zip(x_positions, highs, strict=True)]),
    ]
    return "M" + "L".join(f"{x} {y}" for x, y in outline) + "Z"


def _make_legend(plot: Plot) -> Html:
    """Return the legend, with each line's last value."""
    items = []
    for label, pieces in _group_by_label(plot).items():
        first = pieces[0]
        if first.faint:
            continue
        swatch = f"swatch c{first.colour}{' dashed' * first.dashed}"
        last = next((y for line in reversed(pieces) for y in reversed(line.y)), math.nan)
        sign = element("i", class_=swatch, aria_hidden="true")
        items.append(element("li", sign, label, " ", element("b", format_number(last))))
    for label, value in plot.levels:
        sign = element("i", class_="swatch level", aria_hidden="true")
        items.append(element("li", sign, label, " ", element("b", format_number(value))))
    return element("ul", *items, class_="legend")


def _group_by_label(plot: Plot) -> dict[str, list[Line]]:
    """Return the lines of each curve."""
    curves: dict[str, list[Line]] = {}
    for line in plot.lines:
        curves.setdefault(line.label, []).append(line)
    return curves


def _describe_plot(plot: Plot) -> str:
    """Describe the plot in words."""
    descriptions = []
    for label, pieces in _group_by_label(plot).items():
        points = [(y, x) for line in pieces for x, y in zip(line.x, line.y, strict=True)]
        drawable_points = [point for point in points if is_drawable(point[0])]
        if not drawable_points:
            descriptions.append(f"{label}: no value that is a number")
            continue
        (first, first_x), (last, last_x) = drawable_points[0], drawable_points[-1]
        (low, low_x), (high, high_x) = (
            min(drawable_points, key=itemgetter(0)),
            max(drawable_points, key=itemgetter(0)),
        )
        descriptions.append(
            f"{label}: {format_number(first)} at {plot.axis} {_format_position(first_x)}, "
            f"{format_number(last)} at {_format_position(last_x)}, "
            f"lowest {format_number(low)} at {_format_position(low_x)}, "
            f"highest {format_number(high)} at "
            f"{_format_position(high_x)}"
        )
    return f"{_plot_name(plot)}. {'; '.join(descriptions)}"


def _draw_marks(plot: Plot, x_scale: Scale) -> Html:
    """Return the marks; several of a kind at one position become one."""
    marks_by_position: dict[tuple[int, str, int], list[Mark]] = {}
    for mark in plot.marks:
        position_index = round(x_scale.position(mark.x) * _MARK_POSITIONS)
        marks_by_position.setdefault((mark.row, mark.kind, position_index), []).append(mark)
    rows: dict[int, list[Html]] = {}
    for (row, kind, _), marks in marks_by_position.items():
        position = x_scale.position((marks[0].x + marks[-1].x) / 2)
        title = marks[0].title if len(marks) == 1 else f"{len(marks)}: {marks[0].title}, …"
        sign = element(
            "span", SIGNS[kind], class_=f"mark {kind}", title=title,
            style=f"left:{100 * position:.2f}%",
        )  # fmt: skip
        rows.setdefault(row, []).append(sign)
    # Screen readers use the table of events instead.
    return join_parts(
        element("div", *signs, class_=f"marks c{row % COLOURS}", aria_hidden="true")
        for row, signs in sorted(rows.items())
    )


def _value_table(plot: Plot) -> Html:
    """Return a table of some values of the current curves, extremes included."""
    curves = {
        label: pieces for label, pieces in _group_by_label(plot).items() if not pieces[0].faint
    }
    values_by_curve = [
        {x: y for line in pieces for x, y in zip(line.x, line.y, strict=True)}
        for pieces in curves.values()
    ]
    selected_x: set[float] = set()
    for curve_values in values_by_curve:
        keys = list(curve_values)
        selected_x.update(keys[i] for i in sample_indices(len(keys), _MAX_TABLE_ROWS))
        drawable_x = [key for key in keys if is_drawable(curve_values[key])]
        if drawable_x:
            selected_x |= {
                min(drawable_x, key=curve_values.__getitem__),
                max(drawable_x, key=curve_values.__getitem__),
            }
    rows = (
        [
            _format_position(x),
            *(format_number(whole[x]) if x in whole else "" for whole in values_by_curve),
        ]
        for x in sorted(selected_x)
    )
    caption = f"{_plot_name(plot)}: some values and extremes"
    return table([plot.axis, *curves], rows, caption=caption, align_numbers=True)


def _plot_name(plot: Plot) -> str:
    return ", ".join(filter(None, (plot.title, plot.unit)))


def _script_data(plot: Plot, x_scale: Scale, y_scale: Scale) -> Html:
    """Return the data with which the page's script displays values."""
    data = {
        "axis": plot.axis,
        "x": [x_scale.low, x_scale.high, x_scale.log],
        "y": [y_scale.low, y_scale.high, y_scale.log],
        "lines": [
            {
                "label": line.label,
                "colour": line.colour,
                "faint": line.faint,
                "x": [_round_value(x) for x in line.x],
                "y": [_round_value(y) if is_drawable(y) else format_number(y) for y in line.y],
            }
            for line in plot.lines
        ],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json">{text}</script>')


def _round_value(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.6g}")


def _format_position(x: float) -> str:
    """Format a position on the horizontal axis; steps and sizes are exact."""
    return f"{x:,.0f}" if x == int(x) else format_number(x)
