"""Bus bandwidths of both sides over the size of messages, as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flagscale.bench.collectives.plots import image_kind, image_of, new_figure, over_sizes
from flagscale.errors import ConfigError

_COLUMNS = 3
_SIDES = (("our_busbw", "this benchmark", "C0", "-"), ("bare_busbw", "baseline", "black", ":"))


def write(result: Mapping[str, Any], path: Path) -> None:
    """A panel for each operation of what ``--json`` keeps, in 1e9 bytes a second.

    Raises:
        ConfigError: the result has no rows, the file another ending, or matplotlib is missing.
        OSError: the file cannot be written.
    """
    kind = image_kind(path)
    rows = result.get("rows", [])
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    if not operations:
        raise ConfigError("nothing was measured that could be drawn")
    columns = min(_COLUMNS, len(operations))
    lines = math.ceil(len(operations) / columns)
    figure = new_figure(4.4 * columns, 3.4 * lines)
    figure.suptitle(f"{result['ranks']} ranks, {result['device']}, {result['library']}, "
                    f"{result['way']}, {result['type']}")  # fmt: skip
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, operation in zip(panels, operations, strict=False):
        own = [row for row in rows if row["operation"] == operation]
        for side, label, colour, style in _SIDES:
            panel.plot([row["size"] for row in own], [row[side] for row in own], color=colour,
                       linestyle=style, marker=".", label=label)  # fmt: skip
        over_sizes(panel, operation, "busbw (GB/s)", (row["size"] for row in own))
        panel.set_yscale("log")
    for panel in panels[len(operations) :]:
        panel.set_axis_off()
    panels[0].legend(fontsize="small")
    path.write_bytes(image_of(figure, kind))
