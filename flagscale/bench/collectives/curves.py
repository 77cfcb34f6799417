"""Curves of time and bandwidth over size, of our rows and other tools' outputs; as SVG or PNG."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.bench.collectives.operations import OPERATIONS
from flagscale.bench.collectives.records import GB, GIB, Row
from flagscale.bench.files import read_text
from flagscale.errors import ConfigError
from flagscale.report.figure import Line, write_panels


@dataclass(frozen=True)
class Point:
    """One size: bytes, microseconds, 1e9 bytes a second."""

    size: int
    time: float
    busbw: float
    time_spread: tuple[float, float] | None = None
    """The middle half of the iterations."""

    @property
    def busbw_spread(self) -> tuple[float, float] | None:
        if self.time_spread is None:
            return None
        quick, slow = self.time_spread
        return self.busbw * self.time / slow, self.busbw * self.time / quick


@dataclass(frozen=True)
class Curve:
    """What is drawn as one line."""

    label: str
    points: tuple[Point, ...]
    imported: bool = False
    operation: str | None = None
    """What was measured, where it is known."""


def curves_of(rows: Iterable[Row]) -> list[Curve]:
    """Our rows as curves: one an operation, type, reduction, root, place and backend."""
    found: dict[tuple[str, ...], list[Point]] = {}
    for row in rows:
        if row.failure is not None or not row.time > 0:
            continue
        words = [row.operation, row.type]
        words += [row.reduction] if row.reduction not in ("none", "sum") else []
        words += [f"root {row.root}"] if row.root > 0 else []
        words += ["in place"] if row.in_place and row.operation != "all_reduce" else []
        point = Point(row.size, row.time, row.busbw, row.spread)
        found.setdefault((*words, row.backend), []).append(point)
    return [_curve(" ".join(key), points, operation=key[0]) for key, points in found.items()]


def _curve(
    label: str, points: Iterable[Point], *, imported: bool = False, operation: str | None = None
) -> Curve:
    return Curve(label, tuple(sorted(points, key=lambda p: p.size)), imported, operation)


def read_results(path: Path) -> list[Curve]:
    """The curves of a file that nccl-tests, nccom-test, FlagCX or this program wrote.

    Text is recognised by its lines, JSON by its keys.

    Raises:
        ConfigError: it cannot be read, or holds no result that is known here.
    """
    text = read_text(path, f"--import {path}")
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        found = _from_text(text)
    else:
        found = _from_json(data, path)
    named: dict[str, list[Point]] = {}
    for name, point in found:
        named.setdefault(name, []).append(point)
    curves = [
        _curve(
            f"{path.stem}{': ' if name else ''}{name}",
            points,
            imported=True,
            operation=first if (first := name.partition(" ")[0]) in OPERATIONS else None,
        )
        for name, points in named.items()
    ]
    if not curves:
        raise ConfigError(
            f"--import {path}: no results in it; expected the output of nccl-tests, nccom-test, "
            "FlagCX or --report-to-json-file"
        )
    return curves


_Named = Iterator[tuple[str, Point]]

_NCCL = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w*\s+\w+\s+-?\d+\s+(?P<rest>\S.*)")
_FLAGCX = re.compile(
    r"Comm size: (?P<size>\d+) bytes; Elapsed time: (?P<time>[\d.]+) sec; "
    r"Algo bandwidth: [\d.]+ GB/s; Bus bandwidth: (?P<busbw>[\d.]+) GB/s"
)


def _from_text(text: str) -> _Named:
    heading: list[str] = []
    for line in text.splitlines():
        if "size(B)" in line.split():
            heading = line.split()
        elif match := _FLAGCX.search(line):
            time = float(match["time"]) * 1e6
            yield "FlagCX", Point(int(match["size"]), time, float(match["busbw"]))
        elif match := _NCCL.fullmatch(line):
            yield from _nccl_points(int(line.split()[0]), match["rest"].split())
        elif heading and (nccom := _nccom_point(heading, line.split())):
            yield "nccom-test", nccom


def _nccl_points(size: int, cells: Sequence[str]) -> _Named:
    """Time, algbw, busbw and #wrong, out of place and then in place."""
    for name, four in (("out of place", cells[:4]), ("in place", cells[4:8])):
        if len(four) == 4 and four[0] != "N/A":
            yield name, Point(size, float(four[0]), float(four[2]))


def _nccom_point(heading: Sequence[str], cells: Sequence[str]) -> Point | None:
    # Under time(us) nccom-test's GB are 2**30 bytes, under time:avg(us) they are 1e9.
    old = "time(us)" in heading
    time = "time(us)" if old else "time:avg(us)"
    bandwidth = next((name for name in heading if name.startswith("busbw(")), None)
    if len(cells) != len(heading) or time not in heading or bandwidth is None:
        return None
    row = dict(zip(heading, cells, strict=True))
    binary = old or bandwidth == "busbw(GiB/s)"
    try:
        busbw = float(row[bandwidth]) * (GIB / GB if binary else 1)
        return Point(int(row["size(B)"]), float(row[time]), busbw)
    except ValueError:
        return None


def _from_json(data: Any, path: Path) -> _Named:
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
                yield from _nccl_json_points(row)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--import {path}: a result lacks or misstates {error}") from error


def _nccl_json_points(row: Mapping[str, Any]) -> _Named:
    for key in ("out_of_place", "in_place"):
        values = row.get(key)
        if values and math.isfinite(float(values["time"])):
            size, time, busbw = int(row["size"]), float(values["time"]), float(values["bus_bw"])
            yield key.replace("_", " "), Point(size, time, busbw)


def write_plot(
    path: Path, curves: Sequence[Curve], limits: Mapping[str, float] | None = None
) -> None:
    """Write time and bandwidth beside each other into ``path``, an ``.svg`` or a ``.png``.
    ``limits`` of the bus bandwidth, in 1e9 bytes a second, are lines across by their names.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    sizes = {max(point.size, 1) for curve in curves for point in curve.points}
    levels = [
        Line(f"{name}, {value:.4g} GB/s", dict.fromkeys(sizes, value), "gray", style)
        for style, (name, value) in zip((":", "-."), (limits or {}).items(), strict=False)
    ]
    panels = {
        "time (microseconds)": [_line(i, curve, "time") for i, curve in enumerate(curves)],
        "bus bandwidth (1e9 bytes a second)": [
            *(_line(i, curve, "busbw") for i, curve in enumerate(curves)),
            *levels,
        ],
    }
    write_panels(path, "", "", panels, legend=-1)


def _line(index: int, curve: Curve, what: str) -> Line:
    values = {max(point.size, 1): getattr(point, what) for point in curve.points}
    return Line(curve.label, values, f"C{index % 10}", "--" if curve.imported else "-")
