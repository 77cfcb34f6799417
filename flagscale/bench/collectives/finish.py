"""After the last row: plots, the report, the baseline; and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from flagscale.bench.collectives.curves import curves_of, read_results
from flagscale.bench.collectives.plots import write_plot
from flagscale.bench.collectives.records import Row, hold, limits_of, read_baseline
from flagscale.bench.collectives.report import write_report
from flagscale.bench.collectives.spec import BenchSpec

EXIT_FAILED = 1
EXIT_WORSE = 4


def finish(
    spec: BenchSpec, rows: Sequence[Row], header: Sequence[str], about: Mapping[str, Any]
) -> int:
    """Write what was asked for and judge the run: 0, 1 (a row failed) or 4 (worse than before).

    Raises:
        ConfigError: an imported file or the baseline cannot be read.
        OSError: a file cannot be written.
    """
    _draw(spec, rows, header, about)
    if any(not row.ok for row in rows):
        return EXIT_FAILED
    return _against_baseline(spec, rows)


def _draw(
    spec: BenchSpec, rows: Sequence[Row], header: Sequence[str], about: Mapping[str, Any]
) -> None:
    output = spec.output
    if not output.plots and output.report is None:
        return
    imported = [curve for path in output.imports for curve in read_results(path)]
    curves = [*curves_of(rows), *imported]
    for path in output.plots:
        write_plot(path, curves, limits_of(rows))
    if output.report is not None:
        write_report(output.report, rows, curves, header, about)


def _against_baseline(spec: BenchSpec, rows: Sequence[Row]) -> int:
    if spec.comparison.baseline is None:
        return 0
    path = spec.comparison.baseline
    held = hold(rows, read_baseline(path), spec.comparison.tolerance)
    if not held.compared:
        print(f"error: --baseline {path}: none of its rows is one of these", file=sys.stderr)
        return 2
    for line in held.worse:
        print(f"worse: {line}", file=sys.stderr)
    print(f"# baseline: {held.compared} compared, {len(held.worse)} worse")
    sys.stdout.flush()
    return EXIT_WORSE if held.worse else 0
