"""What a run leaves: the rows of each file, plots, the report, the baseline; and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.bench.collectives.curves import curves_of
from flagscale.bench.collectives.plots import write_plot
from flagscale.bench.collectives.records import Row, hold, limits_of
from flagscale.bench.collectives.report import write_report
from flagscale.bench.collectives.spec import BenchSpec

EXIT_FAILED = 1
EXIT_WORSE = 4


class Kept:
    """The rows of every file. Lines of a batch may name the same one: it gets the rows of all."""

    def __init__(self) -> None:
        self._rows: dict[Path, list[Row]] = {}

    def of(self, path: Path) -> list[Row]:
        return self._rows.setdefault(path.absolute(), [])

    def add(self, rows: Sequence[Row], spec: BenchSpec) -> None:
        for path in dict.fromkeys(path.absolute() for path in spec.output.files):
            self.of(path).extend(rows)


def finish(
    spec: BenchSpec,
    rows: Sequence[Row],
    kept: Kept,
    header: Sequence[str],
    about: Mapping[str, Any],
) -> int:
    """Write what was asked for and judge the run: 0, 1 (a row failed) or 4 (worse than before).

    Raises:
        OSError: a file cannot be written.
    """
    imported = spec.output.imports
    for path in spec.output.plots:
        own = kept.of(path)
        write_plot(path, [*curves_of(own), *imported], limits_of(own))
    if (report := spec.output.report) is not None:
        own = kept.of(report)
        write_report(report, own, [*curves_of(own), *imported], header, about)
    if any(not row.ok for row in rows):
        return EXIT_FAILED
    return _against_baseline(spec, rows)


def _against_baseline(spec: BenchSpec, rows: Sequence[Row]) -> int:
    baseline = spec.comparison.baseline
    if baseline is None:
        return 0
    held = hold(rows, baseline, spec.comparison.tolerance)
    if not held.compared:
        print(
            f"error: --baseline {baseline.path}: none of its rows is one of these", file=sys.stderr
        )
        return 2
    for line in held.worse:
        print(f"worse: {line}", file=sys.stderr)
    print(f"# baseline: {held.compared} compared, {len(held.worse)} worse")
    sys.stdout.flush()
    return EXIT_WORSE if held.worse else 0
