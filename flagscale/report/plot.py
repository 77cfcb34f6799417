"""Plot of lines over one axis, as HTML.

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
_MARK_PLACES = 160
_TABLE_ROWS = 14
COLOURS = 8
"""Size of the page's palette."""
_DOT_LIMIT = 30
"""Curves with at most this many points show each point as a dot."""
SIGNS = {"checkpoint": "●", "restart": "▲", "spike": "◆", "failure": "✕"}
MARKS = {
    "checkpoint": "a checkpoint was saved",
    "restart": "the job was started again",
    "spike": "a spike, or a value that is no number",
    "failure": "the first failure",
}
"""Kinds of marks and their meanings."""


Level = tuple[str, float]
"""Horizontal line: name and value."""


@dataclass(frozen=True)
class Line:
    """Values over an axis: ``x`` ascending, ``y`` with equal length.

    Lines with one ``label`` are pieces of one curve. ``colour`` is an index of the page's palette.
    ``faint`` lines are superseded; ``dashed`` ones are of another kind. A line with ``spread`` is
    never thinned.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dashed: bool = False
    faint: bool = False
    spread: Sequence[tuple[float, float]] = ()
    """Range of each value, if known."""


@dataclass(frozen=True)
class Mark:
    """Event at ``x``. ``kind`` is a key of :data:`MARKS`; ``row`` is the line below the plot."""

    x: float
    kind: str
    title: str
    row: int = 0


@dataclass(frozen=True)
class Plot:
    """Lines that are drawn together.

    ``levels`` are horizontal lines. ``points`` is the approximate number of points kept per line.
    Plots of one ``group`` share their ``x`` and their cursor.
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
    points: int = 2000
    group: str = ""


def render_plot(plot: Plot) -> Html:
    """Render the plot, its legend, the data for keyboard and pointer, and a table of values."""
    lines = [_thin_line(line, plot.points) for line in plot.lines if len(line.x)]
    plot = replace(plot, lines=lines)
    ends = plot.x_range or tuple(chain.from_iterable((line.x[0], line.x[-1]) for line in lines))
    x_scale = fit_scale(ends, log=plot.x_log, room=0.02 if plot.x_log else 0.0)
    values = chain(
        (v for line in lines for v in (*line.y, *chain.from_iterable(line.spread))),
        (value for _, value in plot.levels),
    )
    y_scale = fit_scale(values, log=plot.y_log, room=0.05)
    field = element(
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
        field,
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


def _thin_line(line: Line, points: int) -> Line:
    if line.spread:
        return line
    x, y = thin_points(line.x, line.y, points)
    return replace(line, x=x, y=y)


def _choose_x_ticks(plot: Plot, x_scale: Scale) -> Sequence[Tick]:
    return x_scale.ticks(_X_TICKS) if plot.x_ticks is None else plot.x_ticks


def _tick_labels(ticks: Sequence[Tick], scale: Scale, side: str) -> Iterator[Html]:
    for value, label in ticks:
        yield element("span", label, style=f"{side}:{100 * scale.place(value):.2f}%")


def _draw_svg(plot: Plot, x_scale: Scale, y_scale: Scale) -> Html:
    grid = [
        f"M0 {_to_svg_y(y_scale.place(value))}h{_WIDTH}" for value, _ in y_scale.ticks(_Y_TICKS)
    ]
    grid += [
        f"M{_to_svg_x(x_scale.place(value))} 0v{_HEIGHT}"
        for value, _ in _choose_x_ticks(plot, x_scale)
    ]
    levels = "".join(f"M0 {_to_svg_y(y_scale.place(value))}h{_WIDTH}" for _, value in plot.levels)
    parts = [element("path", class_="grid", d="".join(grid))]
    parts += [element("path", class_="level", d=levels)] if levels else []
    for mark in (mark for mark in plot.marks if mark.kind in ("restart", "failure")):
        at = _to_svg_x(x_scale.place(mark.x))
        parts.append(element("path", class_=f"when {mark.kind}", d=f"M{at} 0v{_HEIGHT}"))
    curves = _group_by_label(plot)
    for line in (line for line in plot.lines if line.spread):
        parts.append(
            element("path", class_=f"band c{line.colour}", d=_band_path(line, x_scale, y_scale))
        )
    for line in plot.lines:
        classes = f"line c{line.colour}{' dashed' * line.dashed}{' faint' * line.faint}"
        few = not line.faint and sum(len(piece.x) for piece in curves[line.label]) <= _DOT_LIMIT
        path, dots = _line_paths(line, x_scale, y_scale, few=few)
        parts.append(element("path", class_=classes, d=path))
        if dots:
            parts.append(element("path", class_=f"{classes} dots", d=dots))
    return element(
        "svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", preserveAspectRatio="none", role="img",
        aria_label=_describe_plot(plot),
    )  # fmt: skip


def _to_svg_x(share: float) -> int:
    return round(share * _WIDTH)


def _to_svg_y(share: float) -> int:
    return round((1 - share) * _HEIGHT)


def _line_paths(line: Line, x_scale: Scale, y_scale: Scale, *, few: bool) -> tuple[str, str]:
    """Return the path of a line, and the path of its dots.

    The line is broken where a value cannot be drawn. Points get dots if they are few or isolated.
    """
    pieces: list[list[tuple[int, int]]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if is_drawable(y) and not (y_scale.log and y <= 0):
            pieces[-1].append((_to_svg_x(x_scale.place(x)), _to_svg_y(y_scale.place(y))))
        elif pieces[-1]:
            pieces.append([])
    pieces = [piece for piece in pieces if piece]
    words = (
        f"M{piece[0][0]} {piece[0][1]}"
        + "".join(f"l{c - a} {d - b}" for (a, b), (c, d) in pairwise(piece))
        for piece in pieces
    )
    dots = (f"M{x} {y}h0" for piece in pieces for x, y in piece if few or len(piece) == 1)
    return "".join(words), "".join(dots)


def _band_path(line: Line, x_scale: Scale, y_scale: Scale) -> str:
    """Return the area between the lower and upper ends of a line's values."""
    places = [_to_svg_x(x_scale.place(x)) for x in line.x]
    lows, highs = (
        [_to_svg_y(y_scale.place(end)) for end in ends] for ends in zip(*line.spread, strict=True)
    )
    around = [*zip(places, lows, strict=True), *reversed([*zip(places, highs, strict=True)])]
    return "M" + "L".join(f"{x} {y}" for x, y in around) + "Z"


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
    """Return the pieces of each curve."""
    curves: dict[str, list[Line]] = {}
    for line in plot.lines:
        curves.setdefault(line.label, []).append(line)
    return curves


def _describe_plot(plot: Plot) -> str:
    """Describe the plot in words."""
    descriptions = []
    for label, pieces in _group_by_label(plot).items():
        points = [(y, x) for line in pieces for x, y in zip(line.x, line.y, strict=True)]
        fit = [point for point in points if is_drawable(point[0])]
        if not fit:
            descriptions.append(f"{label}: no value that is a number")
            continue
        (first, at), (last, end) = fit[0], fit[-1]
        (low, low_at), (high, high_at) = min(fit, key=itemgetter(0)), max(fit, key=itemgetter(0))
        descriptions.append(
            f"{label}: {format_number(first)} at {plot.axis} {_format_position(at)}, "
            f"{format_number(last)} at {_format_position(end)}, "
            f"lowest {format_number(low)} at {_format_position(low_at)}, "
            f"highest {format_number(high)} at "
            f"{_format_position(high_at)}"
        )
    return f"{_plot_name(plot)}. {'; '.join(descriptions)}"


def _draw_marks(plot: Plot, x_scale: Scale) -> Html:
    """Return the marks; several of a kind at one place become one."""
    places: dict[tuple[int, str, int], list[Mark]] = {}
    for mark in plot.marks:
        place = round(x_scale.place(mark.x) * _MARK_PLACES)
        places.setdefault((mark.row, mark.kind, place), []).append(mark)
    rows: dict[int, list[Html]] = {}
    for (row, kind, _), marks in places.items():
        position = x_scale.place((marks[0].x + marks[-1].x) / 2)
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
    wholes = [
        {x: y for line in pieces for x, y in zip(line.x, line.y, strict=True)}
        for pieces in curves.values()
    ]
    chosen: set[float] = set()
    for whole in wholes:
        keys = list(whole)
        chosen.update(keys[i] for i in sample_indices(len(keys), _TABLE_ROWS))
        fit = [key for key in keys if is_drawable(whole[key])]
        if fit:
            chosen |= {min(fit, key=whole.__getitem__), max(fit, key=whole.__getitem__)}
    rows = (
        [_format_position(x), *(format_number(whole[x]) if x in whole else "" for whole in wholes)]
        for x in sorted(chosen)
    )
    caption = f"{_plot_name(plot)}: some values and extremes"
    return table([plot.axis, *curves], rows, caption=caption, numbers=True)


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
