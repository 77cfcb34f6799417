"""Bus bandwidths of both sides over the size of messages, as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flagscale.bench.collectives.plots import Line, write_panels

_SIDES = (("our_busbw", "this benchmark", "C0", "-"), ("bare_busbw", "baseline", "black", ":"))


def write(result: Mapping[str, Any], path: Path) -> None:
    """A panel for each operation of what ``--json`` keeps, in 1e9 bytes a second; raises as
    :func:`.plots.write_panels` does."""
    of_each: dict[str, list[Mapping[str, Any]]] = {}
    for row in result.get("rows", []):
        of_each.setdefault(row["operation"], []).append(row)
    panels = {
        operation: [
            Line(label, {row["size"]: row[side] for row in rows}, colour, style)
            for side, label, colour, style in _SIDES
        ]
        for operation, rows in of_each.items()
    }
    about = [result.get(name) for name in ("device", "library", "way", "type")]
    title = f"{result.get('ranks')} ranks, {', '.join(map(str, about))}"
    write_panels(path, title, "busbw (GB/s)", panels)
