"""Figures as SVG or PNG for papers and slides, drawn by matplotlib."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.errors import ConfigError
from flagscale.report.scale import format_size


@dataclass(frozen=True)
class PanelLine:
    """Line in a panel of :func:`write_panels`: values by size in bytes, and a matplotlib colour and
    line style.
    """

    label: str
    values: Mapping[int, float]
    colour: str
    style: str = "-"


def write_panels(
    path: Path,
    title: str,
    unit: str,
    panels: Mapping[str, Sequence[PanelLine]],
    *,
    columns: int = 3,
    legend_index: int = 0,
) -> None:
    """Write a figure with one panel per entry of ``panels``, with logarithmic axes.

    ``legend_index`` is the index of the panel that contains the legend.

    Raises:
        ConfigError: there are no panels, or matplotlib is missing.
        OSError: the file cannot be written.
    """
    if not panels:
        raise ConfigError("nothing was measured that could be drawn")
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(4.5 * columns, 3.6 * rows)
    figure.suptitle(title)
    all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (name, lines) in zip(all_axes, panels.items(), strict=False):
        for line in (line for line in lines if line.values):
            axes.plot(*zip(*sorted(line.values.items()), strict=True), color=line.colour,
                      linestyle=line.style, marker=".", label=line.label)  # fmt: skip
        label_size_axes(axes, name, unit, (size for line in lines for size in line.values))
        axes.set_yscale("log")
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    all_axes[legend_index].legend(fontsize="small")
    path.write_bytes(encode_image(figure, path.suffix.lower().lstrip(".")))


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure with these dimensions in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib("a figure")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text stays text, so that an SVG can be searched. Ids do not change from run to run.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "flagscale"})
    return Figure(figsize=(width, height), layout="constrained")


def require_matplotlib(feature: str) -> None:
    """Check that matplotlib is installed, before anything is measured.

    Raises:
        ConfigError: it is not installed; the message names ``feature``, which needs it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{feature} needs matplotlib, which is not installed",
            hint="pip install 'flagscale[bench]', or python -m pip install -e '.[bench]' in a "
            "checkout",
        )


def require_image(path: Path, flag: str = "") -> None:
    """Check that a figure can be written to ``path``, which the option ``flag`` names.

    Raises:
        ConfigError: it ends in neither ``.svg`` nor ``.png``, or matplotlib is not installed.
    """
    name = f"{flag} {path}".strip()
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"{name}: expected a file that ends in .svg or .png")
    require_matplotlib(name)


def encode_image(figure: Any, file_format: str) -> bytes:
    """Return the figure as an ``svg`` or ``png`` image; equal figures give equal bytes."""
    image = io.BytesIO()
    metadata = {"Date": None} if file_format == "svg" else None
    figure.savefig(image, format=file_format, metadata=metadata, dpi=120)
    return image.getvalue()


def label_size_axes(axes: Any, title: str, unit: str, measured_sizes: Iterable[int]) -> None:
    """Label axes whose horizontal one is a size in bytes."""
    axes.set_title(title)
    axes.set_xlabel("size")
    axes.set_ylabel(unit)
    axes.set_xscale("log", base=2)
    axes.grid(visible=True, which="major", alpha=0.3)
    sizes = sorted({size for size in measured_sizes if size})
    labelled_sizes = sizes[:: max(1, len(sizes) // 8)]
    axes.set_xticks(labelled_sizes, [format_size(size) for size in labelled_sizes])
    axes.minorticks_off()
