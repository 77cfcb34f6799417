"""Latency and bandwidth over size, as SVG or PNG."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.bench.collectives.curves import Curve
from flagscale.bench.collectives.sizes import format_size
from flagscale.errors import ConfigError


def write_plot(
    path: Path, curves: Sequence[Curve], limits: Mapping[str, float] | None = None
) -> None:
    """Write both diagrams beside each other into ``path``, an ``.svg`` or a ``.png``.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    path.write_bytes(draw(curves, path.suffix.lower().lstrip("."), limits))


def draw(curves: Sequence[Curve], kind: str, limits: Mapping[str, float] | None = None) -> bytes:
    """The two diagrams as an ``svg`` or ``png`` image. ``limits`` of the bus bandwidth, in 1e9
    bytes a second, are lines across by their names.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(12, 4.5)
    latency, bandwidth = figure.subplots(1, 2)
    for curve in curves:
        sizes = [max(point.size, 1) for point in curve.points]
        style = {"linestyle": "--" if curve.imported else "-", "marker": ".", "label": curve.label}
        latency.plot(sizes, [point.time for point in curve.points], **style)
        bandwidth.plot(sizes, [point.busbw for point in curve.points], **style)
    for line, (name, value) in zip((":", "-."), (limits or {}).items(), strict=False):
        bandwidth.axhline(value, color="gray", linestyle=line, label=f"{name}, {value:.4g} GB/s")
    measured = [point.size for curve in curves for point in curve.points]
    over_sizes(latency, "time", "microseconds", measured)
    over_sizes(bandwidth, "bus bandwidth", "1e9 bytes a second", measured)
    latency.set_yscale("log")
    if curves:
        bandwidth.legend(fontsize="small")
    return image_of(figure, kind)


@dataclass(frozen=True)
class Line:
    """What :func:`write_panels` draws: a value for each size, and how."""

    label: str
    values: Mapping[int, float]
    colour: str
    style: str = "-"


def write_panels(
    path: Path, title: str, unit: str, panels: Mapping[str, Sequence[Line]], *, columns: int = 3
) -> None:
    """Write a figure with a panel for each of ``panels``, both axes logarithmic.

    Raises:
        ConfigError: there are none, the file has another ending, or matplotlib is missing.
        OSError: the file cannot be written.
    """
    kind = image_kind(path)
    if not panels:
        raise ConfigError("nothing was measured that could be drawn")
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(4.5 * columns, 3.6 * rows)
    figure.suptitle(title)
    all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (name, lines) in zip(all_axes, panels.items(), strict=False):
        for line in lines:
            axes.plot(*zip(*sorted(line.values.items()), strict=True), color=line.colour,
                      linestyle=line.style, marker=".", label=line.label)  # fmt: skip
        over_sizes(axes, name, unit, (size for line in lines for size in line.values))
        axes.set_yscale("log")
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    all_axes[0].legend(fontsize="small")
    path.write_bytes(image_of(figure, kind))


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib("a figure")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text as text: an SVG that can be searched. Ids that do not change from run to run.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "flagscale"})
    return Figure(figsize=(width, height), layout="constrained")


def require_matplotlib(what: str) -> None:
    """Refuse what cannot be drawn; ask while options are judged, before anything is measured.

    Raises:
        ConfigError: matplotlib, which ``what`` needs, is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{what} needs matplotlib, which is not installed",
            hint="pip install 'flagscale[bench]', or python -m pip install -e '.[bench]' in a "
            "checkout",
        )


def require_image(path: Path, flag: str) -> None:
    """Refuse a file that ``flag`` names for a figure which could not be drawn into it.

    Raises:
        ConfigError: it has another ending than ``image_kind`` knows, or matplotlib is absent.
    """
    image_kind(path, f"{flag} {path}")
    require_matplotlib(f"{flag} {path}")


def image_kind(path: Path, name: str = "") -> str:
    """``svg`` or ``png``, by the ending of a file that is to be written.

    Args:
        path: the file.
        name: what messages call it; its path by default.

    Raises:
        ConfigError: it has another ending.
    """
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("svg", "png"):
        raise ConfigError(f"{name or path}: expected a file that ends in .svg or .png")
    return kind


def image_of(figure: Any, kind: str) -> bytes:
    """The figure as an ``svg`` or ``png`` image; equal figures are equal bytes."""
    image = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    figure.savefig(image, format=kind, metadata=metadata, dpi=120)
    return image.getvalue()


def over_sizes(axes: Any, title: str, unit: str, measured: Iterable[int]) -> None:
    """Label axes, of which the horizontal one is the size in bytes."""
    axes.set_title(title)
    axes.set_xlabel("size")
    axes.set_ylabel(unit)
    axes.set_xscale("log", base=2)
    axes.grid(visible=True, which="major", alpha=0.3)
    sizes = sorted({size for size in measured if size})
    shown = sizes[:: max(1, len(sizes) // 8)]
    axes.set_xticks(shown, [format_size(size) for size in shown])
    axes.minorticks_off()
