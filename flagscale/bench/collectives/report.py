"""HTML page of ``flagscale bench collectives --report``: conditions, diagrams and tables of a run.

The page is a single file without references to others.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flagscale.bench.collectives.curves import Curve
from flagscale.bench.collectives.records import ResultRow, find_limits
from flagscale.report.frame import render_page
from flagscale.report.html import Cell, Html, details, element, section, table
from flagscale.report.plot import COLOURS, Line, Plot, render_plot
from flagscale.report.scale import format_size


def render(
    rows: Sequence[ResultRow],
    curves: Sequence[Curve],
    header: Sequence[str],
    conditions: Mapping[str, Any],
) -> str:
    """Return the HTML page.

    Each operation has a section with its diagrams and its table. Imported curves of the same or an
    unknown operation are in its diagrams.

    Args:
        rows: results.
        curves: curves of the rows, and imported ones.
        header: lines on the conditions.
        conditions: the JSON file's record of the conditions.
    """
    names = list(dict.fromkeys(row.operation for row in rows))
    config = conditions.get("config", {})
    prog = config.get("prog", "flagscale bench collectives")
    command = f"{prog} {shlex.join(config.get('command', ()))}"
    top = [f"$ {command}", str(conditions.get("environment", {}).get("date", "")), *header]
    parts = []
    for name in names:
        rows_of_operation = [row for row in rows if row.operation == name]
        shown_curves = [
            curve for curve in curves if curve.points and curve.operation in (name, None)
        ]
        # Operations without data, or whose every size failed, have no curves.
        has_curves = rows_of_operation[0].size and any(
            curve.operation == name for curve in shown_curves
        )
        plots = (
            map(render_plot, _plots(shown_curves, find_limits(rows_of_operation)))
            if has_curves
            else ()
        )
        parts.append(
            section(name, element("div", *plots, class_="plots"), _table(rows_of_operation))
        )
    method = details("how it was measured", element("pre", json.dumps(conditions, indent=1)))
    header_text = element("pre", "\n".join(filter(None, top)))
    return render_page(f"Collectives: {', '.join(names)}", header_text, *parts, method)


def _plots(curves: Sequence[Curve], limits: Mapping[str, float]) -> Iterator[Plot]:
    """Yield diagrams of time and bus bandwidth over size, with logarithmic axes."""
    sizes = sorted({max(point.size, 1) for curve in curves for point in curve.points})
    ticks = sizes[:: max(1, -(-len(sizes) // 7))]
    plot_options: dict[str, Any] = {
        "axis": "bytes",
        "x_log": True,
        "x_ticks": [(size, format_size(size)) for size in ticks],
        "x_range": (sizes[0], sizes[-1]),
        "y_log": True,
    }

    def lines(attribute: str) -> list[Line]:
        return [_line(curve, attribute, index) for index, curve in enumerate(curves)]

    yield Plot("time", "microseconds", lines("time"), **plot_options)
    unit, levels = "1e9 bytes per second", [*limits.items()]
    yield Plot("bus bandwidth", unit, lines("busbw"), levels=levels, **plot_options)


def _line(curve: Curve, attribute: str, index: int) -> Line:
    sizes = [max(point.size, 1) for point in curve.points]
    values = [getattr(point, attribute) for point in curve.points]
    spread = [getattr(point, f"{attribute}_spread") for point in curve.points]
    return Line(
        curve.label,
        sizes,
        values,
        index % COLOURS,
        dashed=curve.imported,
        spread=() if None in spread else spread,
    )


Column = tuple[str, Callable[[ResultRow], str]]


def _columns(rows: Sequence[ResultRow]) -> list[Column]:
    """Return the columns that have a value for any of ``rows``."""
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
    columns += [(name, _format_statistic(name)) for name in names]
    columns += [
        ("algbw (GB/s)", lambda row: f"{row.algbw:.2f}"),
        ("busbw (GB/s)", lambda row: f"{row.busbw:.2f}"),
    ]
    optional: list[Column] = [
        ("of peak", lambda row: f"{row.peak_share:.1%}" if row.peak_share else "-"),
        ("of probe", lambda row: f"{row.probe_share:.1%}" if row.probe_share else "-"),
        ("against the first (95 %)", lambda row: row.ratio.description if row.ratio else "-"),
        ("algorithm", lambda row: row.algorithm),
        ("wrong", lambda row: "-" if row.wrong is None else str(row.wrong)),
    ]
    return columns + [c for c in optional if {c[1](row) for row in rows} - {"-", "n/a"}]


def _format_statistic(name: str) -> Callable[[ResultRow], str]:
    return lambda row: f"{row.statistics[name]:.2f}" if name in row.statistics else "-"


_FAILED_ROW_COLUMNS = 6
"""Number of columns in the row of a failed size, before the error message."""


def _table(rows: Sequence[ResultRow]) -> Html:
    columns = _columns(rows)
    return table([heading for heading, _ in columns], _cells(rows, columns), align_numbers=True)


def _cells(rows: Sequence[ResultRow], columns: Sequence[Column]) -> Iterator[list[object]]:
    for row in rows:
        if row.failure is None:
            yield [text(row) for _, text in columns]
        else:
            cells = [text(row) for _, text in columns[:_FAILED_ROW_COLUMNS]]
            yield [*cells, Cell(row.failure, "bad", len(columns) - _FAILED_ROW_COLUMNS)]
