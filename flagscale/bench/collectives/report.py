"""One HTML file with how a run was measured, its curves and its tables. It loads nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from flagscale.bench.collectives.curves import Curve
from flagscale.bench.collectives.plots import draw
from flagscale.bench.collectives.records import Row
from flagscale.bench.collectives.sizes import format_size

_STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
.bad { color: #b00020; text-align: left }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto }
svg { max-width: 100%; height: auto }"""


def write_report(
    path: Path, rows: Sequence[Row], curves: Sequence[Curve], header: Sequence[str]
) -> None:
    """Write the report.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    path.write_text(render(rows, curves, header), encoding="utf-8")


def render(rows: Sequence[Row], curves: Sequence[Curve], header: Sequence[str]) -> str:
    """The whole page. Every text from outside is escaped."""
    image = draw(curves, "svg").decode()
    # An SVG within HTML has neither an XML declaration nor a document type.
    image = image[re.search(r"<svg\b", image).start() :]  # type: ignore[union-attr]
    names = list(dict.fromkeys(row.operation for row in rows))
    title = f"Collectives: {', '.join(names)}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<pre>{escape(chr(10).join(header))}</pre>",
        image,
    ]
    for name in names:
        parts += [f"<h2>{escape(name)}</h2>", _table([r for r in rows if r.operation == name])]
    return "\n".join([*parts, "</body></html>", ""])


def _table(rows: Sequence[Row]) -> str:
    statistics = list(dict.fromkeys(name for row in rows for name in row.statistics))
    headings = ["size", "bytes", "type", "redop", "place", "backend", "time (us)", *statistics]
    headings += ["algbw (GB/s)", "busbw (GB/s)", "ratio (95 %)", "wrong"]
    lines = ["<table>", _cells("th", headings)]
    for row in rows:
        cells = [format_size(row.size), str(row.size), row.type, row.reduction]
        cells += ["in" if row.in_place else "out", row.backend]
        if row.failure is not None:
            text = f'<td class="bad" colspan="{len(headings) - len(cells)}">{escape(row.failure)}'
            lines.append(_cells("td", cells).replace("</tr>", f"{text}</td></tr>"))
            continue
        cells += [f"{row.time:.2f}", *(f"{row.statistics[name]:.2f}" for name in statistics)]
        cells += [f"{row.algbw:.2f}", f"{row.busbw:.2f}", _ratio(row)]
        cells += ["-" if row.wrong is None else str(row.wrong)]
        lines.append(_cells("td", cells))
    return "\n".join([*lines, "</table>"])


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "-"
    return f"{row.ratio.value:.3f} ({row.ratio.low:.3f} to {row.ratio.high:.3f})"


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts) + "</tr>"
