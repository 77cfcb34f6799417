"""One HTML file with how a run was measured, its curves and its tables. It loads nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flagscale.bench.collectives.curves import Curve
from flagscale.bench.collectives.records import Row, limits_of
from flagscale.report.frame import page
from flagscale.report.html import Cell, Html, details, element, section, table
from flagscale.report.plot import COLOURS, Line, Plot
from flagscale.report.plot import render as plotted
from flagscale.report.scale import format_size


def render(
    rows: Sequence[Row], curves: Sequence[Curve], header: Sequence[str], about: Mapping[str, Any]
) -> str:
    """The whole page: for each operation its diagrams, with the imported curves that may be of it,
    and its table. ``about`` is what a JSON file says beside its results."""
    names = list(dict.fromkeys(row.operation for row in rows))
    config = about.get("config", {})
    command = f"{config.get('prog', 'bench.py')} {shlex.join(config.get('command', ()))}"
    top = [f"$ {command}", str(about.get("environment", {}).get("date", "")), *header]
    parts = []
    for name in names:
        own = [row for row in rows if row.operation == name]
        drawn = [curve for curve in curves if curve.points and curve.operation in (name, None)]
        # What moves nothing, or failed throughout, has no curves.
        known = own[0].size and any(curve.operation == name for curve in drawn)
        plots = map(plotted, _plots(drawn, limits_of(own))) if known else ()
        parts.append(section(name, element("div", *plots, class_="plots"), _table(own)))
    measured = details("how it was measured", element("pre", json.dumps(about, indent=1)))
    first = element("pre", "\n".join(filter(None, top)))
    return page(f"Collectives: {', '.join(names)}", first, *parts, measured)


def _plots(curves: Sequence[Curve], limits: Mapping[str, float]) -> Iterator[Plot]:
    """Time and bus bandwidth over size, both sizes and times by their logarithm."""
    sizes = sorted({max(point.size, 1) for curve in curves for point in curve.points})
    shown = sizes[:: max(1, -(-len(sizes) // 7))]
    shared: dict[str, Any] = {
        "axis": "bytes",
        "x_log": True,
        "x_ticks": [(size, format_size(size)) for size in shown],
        "x_range": (sizes[0], sizes[-1]),
        "y_log": True,
    }

    def lines(what: str) -> list[Line]:
        return [_line(curve, what, index) for index, curve in enumerate(curves)]

    yield Plot("time", "microseconds", lines("time"), **shared)
    unit, levels = "1e9 bytes a second", [*limits.items()]
    yield Plot("bus bandwidth", unit, lines("busbw"), levels=levels, **shared)


def _line(curve: Curve, what: str, index: int) -> Line:
    sizes = [max(point.size, 1) for point in curve.points]
    values = [getattr(point, what) for point in curve.points]
    spread = [getattr(point, f"{what}_spread") for point in curve.points]
    return Line(
        *(curve.label, sizes, values, index % COLOURS),
        dashed=curve.imported,
        spread=() if None in spread else spread,
    )


Column = tuple[str, Callable[[Row], str]]


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Those that say something of any of ``rows``."""
    columns: list[Column] = [
        ("size", lambda row: format_size(row.size)),
        ("bytes", lambda row: str(row.size)),
        ("type", lambda row: row.type),
        ("redop", lambda row: row.reduction),
        ("place", lambda row: "in" if row.in_place else "out"),
        ("backend", lambda row: row.backend),
        ("time (us)", lambda row: f"{row.time:.2f}"),
    ]
    names = dict.fromkeys(name for row in rows for name in row.statistics)
    columns += [(name, _statistic(name)) for name in names]
    columns += [
        ("algbw (GB/s)", lambda row: f"{row.algbw:.2f}"),
        ("busbw (GB/s)", lambda row: f"{row.busbw:.2f}"),
    ]
    further: list[Column] = [
        ("of peak", lambda row: f"{row.peak_share:.1%}" if row.peak_share else "-"),
        ("of probe", lambda row: f"{row.probe_share:.1%}" if row.probe_share else "-"),
        ("against the first (95 %)", lambda row: row.ratio.words if row.ratio else "-"),
        ("algorithm", lambda row: row.algorithm),
        ("wrong", lambda row: "-" if row.wrong is None else str(row.wrong)),
    ]
    return columns + [c for c in further if {c[1](row) for row in rows} - {"-", "n/a"}]


def _statistic(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row.statistics[name]:.2f}" if name in row.statistics else "-"


_BEFORE_TIME = 6
"""Columns that a row has which was not measured."""


def _table(rows: Sequence[Row]) -> Html:
    columns = _columns(rows)
    return table([heading for heading, _ in columns], _cells(rows, columns), numbers=True)


def _cells(rows: Sequence[Row], columns: Sequence[Column]) -> Iterator[list[object]]:
    for row in rows:
        if row.failure is None:
            yield [text(row) for _, text in columns]
        else:
            known = [text(row) for _, text in columns[:_BEFORE_TIME]]
            yield [*known, Cell(row.failure, "bad", len(columns) - _BEFORE_TIME)]
