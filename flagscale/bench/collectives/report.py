"""One HTML file with how a run was measured, its curves and its tables. It loads nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from flagscale.bench.collectives.curves import Curve, draw
from flagscale.bench.collectives.records import Row, limits_of
from flagscale.bench.collectives.sizes import format_size

_STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid #ddd;
  white-space: nowrap }
.bad { color: #b00020; text-align: left; white-space: normal }
pre { background: #f5f5f5; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere }
.wide { overflow-x: auto }
svg { max-width: 100%; height: auto }"""


def render(
    rows: Sequence[Row], curves: Sequence[Curve], header: Sequence[str], about: Mapping[str, Any]
) -> str:
    """The whole page: for each operation its diagrams, with the imported curves that may be of it,
    and its table. ``about`` is what a JSON file says beside its results. Every text from outside
    is escaped.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    names = list(dict.fromkeys(row.operation for row in rows))
    title = f"Collectives: {', '.join(names)}"
    config = about.get("config", {})
    command = f"{config.get('prog', 'bench.py')} {shlex.join(config.get('command', ()))}"
    date = str(about.get("environment", {}).get("date", ""))
    top = "\n".join(filter(None, [f"$ {command}", date, *header]))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<pre>{escape(top)}</pre>",
    ]
    for name in names:
        own = [row for row in rows if row.operation == name]
        drawn = [curve for curve in curves if curve.operation in (name, None)]
        parts.append(f"<h2>{escape(name)}</h2>")
        # What moves nothing, or failed throughout, has no curves.
        if any(curve.operation == name and curve.points for curve in drawn) and own[0].size:
            image = draw(drawn, "svg", limits_of(own)).decode()
            # An SVG within HTML has neither an XML declaration nor a document type.
            parts.append(image[max(image.find("<svg"), 0) :])
        parts.append(_table(own))
    details = escape(json.dumps(about, indent=1))
    parts.append(f"<details><summary>how it was measured</summary><pre>{details}</pre></details>")
    return "\n".join([*parts, "</body></html>", ""])


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
        ("time ratio (95 %)", _ratio),
        ("algorithm", lambda row: row.algorithm),
        ("wrong", lambda row: "-" if row.wrong is None else str(row.wrong)),
    ]
    return columns + [c for c in further if {c[1](row) for row in rows} - {"-", "n/a"}]


def _statistic(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row.statistics[name]:.2f}" if name in row.statistics else "-"


_BEFORE_TIME = 6
"""Columns that a row has which was not measured."""


def _table(rows: Sequence[Row]) -> str:
    columns = _columns(rows)
    lines = ['<div class="wide"><table>', _cells("th", [heading for heading, _ in columns])]
    for row in rows:
        if row.failure is None:
            lines.append(_cells("td", [text(row) for _, text in columns]))
            continue
        cells = _cells("td", [text(row) for _, text in columns[:_BEFORE_TIME]])
        rest = len(columns) - _BEFORE_TIME
        failure = f'<td class="bad" colspan="{rest}">{escape(row.failure)}</td></tr>'
        lines.append(cells.removesuffix("</tr>") + failure)
    return "\n".join([*lines, "</table></div>"])


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "-"
    return f"{row.ratio.value:.3f} ({row.ratio.low:.3f} to {row.ratio.high:.3f})"


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts) + "</tr>"
