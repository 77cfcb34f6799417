"""Text tables in the formats of nccom-test, nccl-tests and FlagCX.

:class:`.presenter.Presenter` prints them line by line, so that the lines of a size can be formatted
before the following sizes are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flagscale.bench.collectives.records import GB, GIB, ResultRow
from flagscale.bench.collectives.spec import BandwidthUnit, BenchSpec
from flagscale.bench.statistics import Ratio, Statistic

_GAP = "    "


def format_number(value: float) -> str:
    """Format a number with at most two decimals, as nccom-test does."""
    return str(round(value, 2)) if math.isfinite(value) else "n/a"


def mean_busbw(rows: Sequence[ResultRow], unit: BandwidthUnit = "GB") -> float:
    """Return the mean bus bandwidth of the successful rows, in ``unit`` per second."""
    values = [row.busbw for row in rows if row.failure is None]
    mean = sum(values) / len(values) if values else 0.0
    return mean if unit == "GB" else mean * GB / GIB


class Table(Protocol):
    """A table: head, lines, foot."""

    def head(self) -> list[str]:
        """Return the lines before the first row."""

    def lines(self, rows: Sequence[ResultRow]) -> list[str]:
        """Return the lines of one size: for one row, or for several places or backends."""

    def foot(self, rows: Sequence[ResultRow]) -> list[str]:
        """Return the lines after the last row."""


@dataclass(frozen=True)
class Column:
    """Heading of a column, function that formats a row's cell, and expected width of the cells."""

    heading: str
    text: Callable[[ResultRow], str]
    max_text_width: int = 0

    @property
    def width(self) -> int:
        return max(len(self.heading), self.max_text_width)


class NccomTable:
    """Right-aligned columns, four blanks apart."""

    def __init__(self, spec: BenchSpec, types: Sequence[str], *, backend_count: int = 1) -> None:
        self._unit = spec.output.unit
        self._has_several_backends = backend_count > 1
        self._columns = _make_columns(spec, types, backend_count)

    def head(self) -> list[str]:
        return [_GAP.join(c.heading.rjust(c.width) for c in self._columns)]

    def lines(self, rows: Sequence[ResultRow]) -> list[str]:
        return [self._line(row) for row in rows]

    def _line(self, row: ResultRow) -> str:
        if row.failure is not None:
            backend_prefix = f"{row.backend}: " if self._has_several_backends else ""
            return (
                f"{str(row.size).rjust(self._columns[0].width)}{_GAP}{backend_prefix}{row.failure}"
            )
        return _GAP.join(c.text(row).rjust(c.width) for c in self._columns)

    def foot(self, rows: Sequence[ResultRow]) -> list[str]:
        lines = []
        # The mean over several backends would have no meaning.
        for name in dict.fromkeys(row.backend for row in rows if self._has_several_backends) or (
            "",
        ):
            backend_rows = [row for row in rows if name in ("", row.backend)]
            backend_label = f" {name}" if name else ""
            if ratios := [
                math.log(row.ratio.value) for row in backend_rows if row.ratio is not None
            ]:
                mean = math.exp(sum(ratios) / len(ratios))
                words = Ratio(mean, mean, mean).description.partition(" (")[0]
                lines.append(f"{name}: {words} as {rows[0].backend}, on average over the sizes")
            busbw = mean_busbw(backend_rows, self._unit)
            lines.append(f"Avg bus bandwidth{backend_label}:\t{busbw:.4f}{self._unit}/s")
        failed = sum(not row.ok for row in rows)
        return [*lines, f"{failed} errors found - test failed"] if failed else lines


def _make_columns(spec: BenchSpec, types: Sequence[str], backend_count: int) -> list[Column]:
    output, scale = spec.output, 1.0 if spec.output.unit == "GB" else GB / GIB
    max_width = len(str(max(spec.sizes)))
    columns = [
        Column("size(B)", lambda r: str(r.size), max_width),
        Column("count(elems)", lambda r: str(r.count), max_width),
    ]
    if output.show_sizes:
        columns += [
            Column("total_input_size(B)", lambda r: str(r.input_bytes)),
            Column("total_output_size(B)", lambda r: str(r.output_bytes)),
        ]
    columns.append(Column("type", lambda r: r.type, max(map(len, types), default=0)))
    if spec.places is not None and len(spec.places) > 1:
        columns.append(Column("place", lambda r: "in" if r.in_place else "out"))
    columns += [_statistic_column(statistic) for statistic in output.statistics]
    columns += [
        Column(f"algbw({output.unit}/s)", lambda r: f"{r.algbw * scale:.2f}"),
        Column(f"busbw({output.unit}/s)", lambda r: f"{r.busbw * scale:.2f}"),
    ]
    return columns + _optional_columns(spec, backend_count)


def _statistic_column(statistic: Statistic) -> Column:
    name = statistic.heading
    if statistic.name == "avg":
        return Column(name, lambda r: format_number(r.time))
    # ``10`` for 10.0: percentiles are often whole.
    return Column(
        name, lambda r: format_number(r.statistics.get(name, math.nan)).removesuffix(".0")
    )


def _optional_columns(spec: BenchSpec, backend_count: int) -> list[Column]:
    columns = []
    if spec.comparison.peak is not None or spec.comparison.probe:
        columns.append(Column("peak(%)", lambda r: _format_share(r.peak_share)))
    if spec.comparison.probe:
        columns.append(Column("probe(%)", lambda r: _format_share(r.probe_share)))
    if backend_count > 1:
        max_name_width = max(map(len, spec.comparison.backends))
        columns += [
            Column("backend", lambda r: r.backend, max_name_width + 2),
            Column("time ratio", lambda r: "1" if r.ratio is None else f"{r.ratio.value:.3f}"),
            Column("95% interval", _format_interval, len("0.000 to 0.000")),
        ]
    if spec.output.show_algorithm:
        columns.append(Column("algorithm", lambda r: r.algorithm))
    return columns


def _format_share(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}".removesuffix("%")


def _format_interval(row: ResultRow) -> str:
    return "-" if row.ratio is None else f"{row.ratio.low:.3f} to {row.ratio.high:.3f}"


class NcclTable:
    """Table of nccl-tests, with out of place and in place side by side. ``count`` is a rank's
    part if the operation divides its buffer.
    """

    def __init__(self, has_shards: bool) -> None:
        self._has_shards = has_shards

    def head(self) -> list[str]:
        prefix = f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}"
        places = "           out-of-place                       in-place          "
        names = ("time", "algbw", "busbw", "#wrong")
        units = ("(us)", "(GB/s)", "(GB/s)", "")
        first = f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
        second = f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}"
        return [
            "#",
            prefix + places,
            first + 2 * _format_cells(*names),
            second + 2 * _format_cells(*units),
        ]

    def lines(self, rows: Sequence[ResultRow]) -> list[str]:
        first = rows[0]
        count = first.count // first.ranks if self._has_shards else first.count
        line = f"{first.size:>12}  {count:>12}  {first.nccl_type:>8}  {first.reduction:>6}"
        line += f"  {first.root:>6}"
        for in_place in (False, True):
            line += _nccl_cells(next((r for r in rows if r.in_place is in_place), None))
        return [line]

    def foot(self, rows: Sequence[ResultRow]) -> list[str]:
        wrong = sum(row.wrong or 0 for row in rows)
        failures = [f"# {row.size}: {row.failure}" for row in rows if row.failure is not None]
        bounds = f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"
        return [*failures, bounds, f"# Avg bus bandwidth    : {mean_busbw(rows):g} ", "#"]


def _nccl_cells(row: ResultRow | None) -> str:
    if row is None or row.failure is not None:
        return _format_cells("N/A", "N/A", "N/A", "N/A")
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    digits = 0 if row.time >= 10_000 else 1 if row.time >= 100 else 2
    return _format_cells(f"{row.time:.{digits}f}", f"{row.algbw:.2f}", f"{row.busbw:.2f}", wrong)


def _format_cells(time: str, algbw: str, busbw: str, wrong: str) -> str:
    return f"  {time:>7}  {algbw:>6}  {busbw:>6} {wrong:>6}"


class FlagcxTable:
    """Output of FlagCX's performance tests: one sentence per size, bandwidths in 1e9 bytes per
    second.
    """

    def head(self) -> list[str]:
        return []

    def lines(self, rows: Sequence[ResultRow]) -> list[str]:
        return [
            f"Comm size: {r.size} bytes; {r.failure}"
            if r.failure is not None
            else f"Comm size: {r.size} bytes; Elapsed time: {r.time / 1e6:.6f} sec; "
            f"Algo bandwidth: {r.algbw:.6f} GB/s; Bus bandwidth: {r.busbw:.6f} GB/s"
            for r in rows
        ]

    def foot(self, rows: Sequence[ResultRow]) -> list[str]:
        failed = sum(not row.ok for row in rows)
        return [f"{failed} errors found - test failed"] if failed else []


def make_table(
    spec: BenchSpec, types: Sequence[str], *, has_shards: bool, backend_count: int = 1
) -> Table:
    """Return the table in the format of ``spec``.

    Args:
        spec: specification of the run.
        types: names of the element types.
        has_shards: the operation divides its logical buffer among the ranks.
        backend_count: number of backends that are compared.
    """
    if spec.output.format == "nccl-tests":
        return NcclTable(has_shards)
    if spec.output.format == "flagcx":
        return FlagcxTable()
    return NccomTable(spec, types, backend_count=backend_count)
