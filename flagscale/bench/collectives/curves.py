"""Curves of time and bus bandwidth over size, from result rows and from other tools' output files.

Used for ``--plot`` (SVG or PNG, :func:`write_plot`), ``--report`` and ``--import``
(:func:`read_results`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.bench.collectives.operations import OPERATIONS
from flagscale.bench.collectives.records import GB, GIB, ResultRow
from flagscale.bench.files import read_text
from flagscale.errors import ConfigError
from flagscale.report.figure import PanelLine, write_panels


@dataclass(frozen=True)
class Point:
    """One size in bytes, its time in microseconds, and its bandwidth in 1e9 bytes per second."""

    size: int
    time: float
    busbw: float
    time_spread: tuple[float, float] | None = None
    """First and third quartile of the iterations' times."""

    @property
    def busbw_spread(self) -> tuple[float, float] | None:
        if self.time_spread is None:
            return None
        fast_time, slow_time = self.time_spread
        return self.busbw * self.time / slow_time, self.busbw * self.time / fast_time


@dataclass(frozen=True)
class Curve:
    """One line of a diagram."""

    label: str
    points: tuple[Point, ...]
    imported: bool = False
    operation: str | None = None
    """The measured operation, if known."""


def make_curves(rows: Iterable[ResultRow]) -> list[Curve]:
    """Return result rows as curves, one per operation, type, reduction, root, place and backend."""
    points_by_name: dict[tuple[str, ...], list[Point]] = {}
    for row in rows:
        if row.failure is not None or not row.time > 0:
            continue
        words = [row.operation, row.type]
        words += [row.reduction] if row.reduction not in ("none", "sum") else []
        words += [f"root {row.root}"] if row.root > 0 else []
        words += ["in place"] if row.in_place and row.operation != "all_reduce" else []
        point = Point(row.size, row.time, row.busbw, row.spread)
        points_by_name.setdefault((*words, row.backend), []).append(point)
    return [
        _sorted_curve(" ".join(key), points, operation=key[0])
        for key, points in points_by_name.items()
    ]


def _sorted_curve(
    label: str, points: Iterable[Point], *, imported: bool = False, operation: str | None = None
) -> Curve:
    return Curve(label, tuple(sorted(points, key=lambda p: p.size)), imported, operation)


def read_results(path: Path) -> list[Curve]:
    """Read the curves of a file that nccl-tests, nccom-test, FlagCX or this program wrote.

    Text is recognised by its lines, JSON by its keys.

    Raises:
        ConfigError: the file cannot be read, or contains no supported result.
    """
    text = read_text(path, f"--import {path}")
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        named_points = _parse_text(text)
    else:
        named_points = _parse_json(data, path)
    points_by_name: dict[str, list[Point]] = {}
    for name, point in named_points:
        points_by_name.setdefault(name, []).append(point)
    curves = [
        _sorted_curve(
            f"{path.stem}{': ' if name else ''}{name}",
            points,
            imported=True,
            operation=first if (first := name.partition(" ")[0]) in OPERATIONS else None,
        )
        for name, points in points_by_name.items()
    ]
    if not curves:
        raise ConfigError(
            f"--import {path}: no results in it; expected the output of nccl-tests, nccom-test, "
            "FlagCX or --report-to-json-file"
        )
    return curves


_NamedPoints = Iterator[tuple[str, Point]]

_NCCL = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w*\s+\w+\s+-?\d+\s+(?P<cells>\S.*)")
_FLAGCX = re.compile(
    r"Comm size: (?P<size>\d+) bytes; Elapsed time: (?P<time>[\d.]+) sec; "
    r"Algo bandwidth: [\d.]+ GB/s; Bus bandwidth: (?P<busbw>[\d.]+) GB/s"
)


def _parse_text(text: str) -> _NamedPoints:
    heading: list[str] = []
    for line in text.splitlines():
        if "size(B)" in line.split():
            heading = line.split()
        elif match := _FLAGCX.search(line):
            time = float(match["time"]) * 1e6
            yield "FlagCX", Point(int(match["size"]), time, float(match["busbw"]))
        elif match := _NCCL.fullmatch(line):
            yield from _parse_nccl_cells(int(line.split()[0]), match["cells"].split())
        elif heading and (nccom := _parse_nccom_cells(heading, line.split())):
            yield "nccom-test", nccom


def _parse_nccl_cells(size: int, cells: Sequence[str]) -> _NamedPoints:
    """Yield points for time, algbw, busbw and #wrong, out of place and then in place."""
    for name, row_cells in (("out of place", cells[:4]), ("in place", cells[4:8])):
        if len(row_cells) == 4 and row_cells[0] != "N/A":
            yield name, Point(size, float(row_cells[0]), float(row_cells[2]))


def _parse_nccom_cells(heading: Sequence[str], cells: Sequence[str]) -> Point | None:
    # Under time(us) nccom-test's GB are 2**30 bytes, under time:avg(us) they are 1e9.
    is_old_format = "time(us)" in heading
    time_column = "time(us)" if is_old_format else "time:avg(us)"
    bandwidth_column = next((name for name in heading if name.startswith("busbw(")), None)
    if len(cells) != len(heading) or time_column not in heading or bandwidth_column is None:
        return None
    row = dict(zip(heading, cells, strict=True))
    is_binary = is_old_format or bandwidth_column == "busbw(GiB/s)"
    try:
        busbw = float(row[bandwidth_column]) * (GIB / GB if is_binary else 1)
        return Point(int(row["size(B)"]), float(row[time_column]), busbw)
    except ValueError:
        return None


def _parse_json(data: Any, path: Path) -> _NamedPoints:
    rows = data.get("results") if isinstance(data, dict) else None
    try:
        for row in rows or []:
            if "size(B)" in row:
                words = (row.get("operation"), row.get("type"), row.get("backend"))
                name = " ".join(word for word in words if word)
                time = row["time:avg(us)"]
                if time is not None and not row.get("failure"):
                    busbw = float(row["busbw(GB/s)"])
                    yield name, Point(int(row["size(B)"]), float(time), busbw)
            else:
                yield from _parse_nccl_json(row)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--import {path}: a result lacks or misstates {error}") from error


def _parse_nccl_json(row: Mapping[str, Any]) -> _NamedPoints:
    for key in ("out_of_place", "in_place"):
        values = row.get(key)
        if values and math.isfinite(float(values["time"])):
            size, time, busbw = int(row["size"]), float(values["time"]), float(values["bus_bw"])
            yield key.replace("_", " "), Point(size, time, busbw)


def write_plot(
    path: Path, curves: Sequence[Curve], limits: Mapping[str, float] | None = None
) -> None:
    """Write diagrams of time and bandwidth side by side to ``path``, an ``.svg`` or ``.png``.

    Args:
        path: file to write.
        curves: lines of the diagrams.
        limits: limits of the bus bandwidth by name, in 1e9 bytes per second, drawn as horizontal
            lines.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    sizes = {max(point.size, 1) for curve in curves for point in curve.points}
    levels = [
        PanelLine(f"{name}, {value:.4g} GB/s", dict.fromkeys(sizes, value), "gray", style)
        for style, (name, value) in zip((":", "-."), (limits or {}).items(), strict=False)
    ]
    panels = {
        "time (microseconds)": [_to_line(i, curve, "time") for i, curve in enumerate(curves)],
        "bus bandwidth (1e9 bytes per second)": [
            *(_to_line(i, curve, "busbw") for i, curve in enumerate(curves)),
            *levels,
        ],
    }
    write_panels(path, "", "", panels, legend_index=-1)


def _to_line(index: int, curve: Curve, attribute: str) -> PanelLine:
    values = {max(point.size, 1): getattr(point, attribute) for point in curve.points}
    return PanelLine(curve.label, values, f"C{index % 10}", "--" if curve.imported else "-")
