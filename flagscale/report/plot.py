"""A plot of lines over one axis, as HTML: what is drawn is SVG, what is written is text beside it,
so that it can be read at any width; and the same as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from operator import itemgetter

from flagscale.report.html import Html, details, element, join, table
from flagscale.report.scale import Scale, Tick, drawable, number, sample, scale_of
from flagscale.report.thin import thin

_WIDTH, _HEIGHT = 2000, 600
"""Of the drawing's own coordinates; the page stretches it."""
_Y_TICKS, _X_TICKS = 5, 6
_MARK_PLACES = 160
_TABLE_ROWS = 14
COLOURS = 8
"""Of the page's palette."""
_FEW = 30
"""A curve of no more points than these shows each as a dot."""
SIGNS = {"checkpoint": "●", "restart": "▲", "spike": "◆", "failure": "✕"}
MARKS = {
    "checkpoint": "a checkpoint was saved",
    "restart": "the job was started again",
    "spike": "a spike, or a value that is no number",
    "failure": "the first failure",
}
"""The kinds of marks, and what they mean."""


Level = tuple[str, float]
"""A value that is a line across, by its name."""


@dataclass(frozen=True)
class Line:
    """Values over an axis, ``x`` ascending, as many of each. Lines of one ``label`` are pieces of
    one curve; ``colour`` is a number of the page's palette. ``faint``: what does not count any
    more; ``dashed``: of another kind than the rest. One with a ``spread`` is never thinned."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dashed: bool = False
    faint: bool = False
    spread: Sequence[tuple[float, float]] = ()
    """Between what each value was, where that is known."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at ``x``; ``kind`` is one of :data:`MARKS`, ``row`` the line below
    the plot that it stands in."""

    x: float
    kind: str
    title: str
    row: int = 0


@dataclass(frozen=True)
class Plot:
    """What is drawn together. ``levels`` are lines across, by their names. ``points``: about how
    many of each line are kept. ``group``: plots that share their ``x``, on which one looks at the
    same place of all."""

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


def render(plot: Plot) -> Html:
    """The plot, its legend, what keyboard and pointer tell of it, and its values as a table."""
    lines = [_thinned(line, plot.points) for line in plot.lines if len(line.x)]
    plot = replace(plot, lines=lines)
    ends = plot.x_range or tuple(chain.from_iterable((line.x[0], line.x[-1]) for line in lines))
    across = scale_of(ends, log=plot.x_log, room=0.02 if plot.x_log else 0.0)
    values = chain(
        (v for line in lines for v in (*line.y, *chain.from_iterable(line.spread))),
        (value for _, value in plot.levels),
    )
    up = scale_of(values, log=plot.y_log, room=0.05)
    field = element(
        "div",
        _drawing(plot, across, up),
        element("i", class_="cross", hidden=True),
        element("output", class_="tip", hidden=True),
        _marks(plot, across),
        class_="field",
    )
    area = element(
        "div",
        element("div", *_written(up.ticks(_Y_TICKS), up, "bottom"), class_="y", aria_hidden="true"),
        field,
        element("div", *_written(_x_ticks(plot, across), across, "left"), class_="x",
                aria_hidden="true"),
        class_="area", tabindex=0, role="group",
        aria_label=f"{plot.title}: arrow keys go from value to value",
    )  # fmt: skip
    unit = ", ".join(filter(None, (plot.unit, "log scale" if up.log else "")))
    caption = element(
        "figcaption",
        element("h3", plot.title, " ", element("small", unit)),
        _legend(plot),
    )
    return element(
        "figure", caption, area, details("values", _values(plot)),
        _data(plot, across, up), class_="plot", data_group=plot.group or None,
    )  # fmt: skip


def _thinned(line: Line, points: int) -> Line:
    if line.spread:
        return line
    x, y = thin(line.x, line.y, points)
    return replace(line, x=x, y=y)


def _x_ticks(plot: Plot, across: Scale) -> Sequence[Tick]:
    return across.ticks(_X_TICKS) if plot.x_ticks is None else plot.x_ticks


def _written(ticks: Sequence[Tick], scale: Scale, side: str) -> Iterator[Html]:
    for value, label in ticks:
        yield element("span", label, style=f"{side}:{100 * scale.place(value):.2f}%")


def _drawing(plot: Plot, across: Scale, up: Scale) -> Html:
    grid = [f"M0 {_down(up.place(value))}h{_WIDTH}" for value, _ in up.ticks(_Y_TICKS)]
    grid += [f"M{_right(across.place(value))} 0v{_HEIGHT}" for value, _ in _x_ticks(plot, across)]
    levels = "".join(f"M0 {_down(up.place(value))}h{_WIDTH}" for _, value in plot.levels)
    parts = [element("path", class_="grid", d="".join(grid))]
    parts += [element("path", class_="level", d=levels)] if levels else []
    for mark in (mark for mark in plot.marks if mark.kind in ("restart", "failure")):
        at = _right(across.place(mark.x))
        parts.append(element("path", class_=f"when {mark.kind}", d=f"M{at} 0v{_HEIGHT}"))
    curves = _curves(plot)
    for line in (line for line in plot.lines if line.spread):
        parts.append(element("path", class_=f"band c{line.colour}", d=_band(line, across, up)))
    for line in plot.lines:
        classes = f"line c{line.colour}{' dashed' * line.dashed}{' faint' * line.faint}"
        few = not line.faint and sum(len(piece.x) for piece in curves[line.label]) <= _FEW
        path, dots = _path(line, across, up, few=few)
        parts.append(element("path", class_=classes, d=path))
        if dots:
            parts.append(element("path", class_=f"{classes} dots", d=dots))
    return element(
        "svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", preserveAspectRatio="none", role="img",
        aria_label=_described(plot),
    )  # fmt: skip


def _right(share: float) -> int:
    return round(share * _WIDTH)


def _down(share: float) -> int:
    return round((1 - share) * _HEIGHT)


def _path(line: Line, across: Scale, up: Scale, *, few: bool) -> tuple[str, str]:
    """The path of a line, broken where a value cannot be drawn; and one of a dot for each of its
    points, where these are few or stand alone."""
    pieces: list[list[tuple[int, int]]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if drawable(y) and not (up.log and y <= 0):
            pieces[-1].append((_right(across.place(x)), _down(up.place(y))))
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


def _band(line: Line, across: Scale, up: Scale) -> str:
    """The area that a line's values were in."""
    places = [_right(across.place(x)) for x in line.x]
    lows, highs = (
        [_down(up.place(end)) for end in ends] for ends in zip(*line.spread, strict=True)
    )
    around = [*zip(places, lows, strict=True), *reversed([*zip(places, highs, strict=True)])]
    return "M" + "L".join(f"{x} {y}" for x, y in around) + "Z"


def _legend(plot: Plot) -> Html:
    """Whose each line is, with its last value."""
    items = []
    for label, pieces in _curves(plot).items():
        first = pieces[0]
        if first.faint:
            continue
        swatch = f"swatch c{first.colour}{' dashed' * first.dashed}"
        last = next((y for line in reversed(pieces) for y in reversed(line.y)), math.nan)
        sign = element("i", class_=swatch, aria_hidden="true")
        items.append(element("li", sign, label, " ", element("b", number(last))))
    for label, value in plot.levels:
        sign = element("i", class_="swatch level", aria_hidden="true")
        items.append(element("li", sign, label, " ", element("b", number(value))))
    return element("ul", *items, class_="legend")


def _curves(plot: Plot) -> dict[str, list[Line]]:
    """The pieces of each curve."""
    found: dict[str, list[Line]] = {}
    for line in plot.lines:
        found.setdefault(line.label, []).append(line)
    return found


def _described(plot: Plot) -> str:
    """The plot in words."""
    told = []
    for label, pieces in _curves(plot).items():
        points = [(y, x) for line in pieces for x, y in zip(line.x, line.y, strict=True)]
        fit = [point for point in points if drawable(point[0])]
        if not fit:
            told.append(f"{label}: no value that is a number")
            continue
        (first, at), (last, end) = fit[0], fit[-1]
        (low, low_at), (high, high_at) = min(fit, key=itemgetter(0)), max(fit, key=itemgetter(0))
        told.append(
            f"{label}: {number(first)} at {plot.axis} {_exact(at)}, {number(last)} at "
            f"{_exact(end)}, lowest {number(low)} at {_exact(low_at)}, highest {number(high)} at "
            f"{_exact(high_at)}"
        )
    return f"{_name(plot)}. {'; '.join(told)}"


def _marks(plot: Plot, across: Scale) -> Html:
    """What happened, a sign each; several of a kind at one place are one."""
    places: dict[tuple[int, str, int], list[Mark]] = {}
    for mark in plot.marks:
        place = round(across.place(mark.x) * _MARK_PLACES)
        places.setdefault((mark.row, mark.kind, place), []).append(mark)
    rows: dict[int, list[Html]] = {}
    for (row, kind, _), marks in places.items():
        left = across.place((marks[0].x + marks[-1].x) / 2)
        title = marks[0].title if len(marks) == 1 else f"{len(marks)}: {marks[0].title}, …"
        sign = element(
            "span", SIGNS[kind], class_=f"mark {kind}", title=title,
            style=f"left:{100 * left:.2f}%",
        )  # fmt: skip
        rows.setdefault(row, []).append(sign)
    # A table has them for those who hear the page.
    return join(
        element("div", *signs, class_=f"marks c{row % COLOURS}", aria_hidden="true")
        for row, signs in sorted(rows.items())
    )


def _values(plot: Plot) -> Html:
    """Some of the values of what counts, the extremes among them."""
    curves = {label: pieces for label, pieces in _curves(plot).items() if not pieces[0].faint}
    wholes = [
        {x: y for line in pieces for x, y in zip(line.x, line.y, strict=True)}
        for pieces in curves.values()
    ]
    chosen: set[float] = set()
    for whole in wholes:
        keys = list(whole)
        chosen.update(keys[i] for i in sample(len(keys), _TABLE_ROWS))
        fit = [key for key in keys if drawable(whole[key])]
        if fit:
            chosen |= {min(fit, key=whole.__getitem__), max(fit, key=whole.__getitem__)}
    rows = (
        [_exact(x), *(number(whole[x]) if x in whole else "" for whole in wholes)]
        for x in sorted(chosen)
    )
    caption = f"{_name(plot)}: some values and extremes"
    return table([plot.axis, *curves], rows, caption=caption, numbers=True)


def _name(plot: Plot) -> str:
    return ", ".join(filter(None, (plot.title, plot.unit)))


def _data(plot: Plot, across: Scale, up: Scale) -> Html:
    """What the page's script needs to tell values."""
    found = {
        "axis": plot.axis,
        "x": [across.low, across.high, across.log],
        "y": [up.low, up.high, up.log],
        "lines": [
            {
                "label": line.label,
                "colour": line.colour,
                "faint": line.faint,
                "x": [_rounded(x) for x in line.x],
                "y": [_rounded(y) if drawable(y) else number(y) for y in line.y],
            }
            for line in plot.lines
        ],
    }
    text = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json">{text}</script>')


def _rounded(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.6g}")


def _exact(x: float) -> str:
    """A place on the axis across: steps and sizes are told to the last digit."""
    return f"{x:,.0f}" if x == int(x) else number(x)
