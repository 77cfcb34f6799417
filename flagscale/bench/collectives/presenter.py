"""Rank 0's voice: header, tables, progress, and the files a run leaves."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from flagscale.bench.collectives.curves import curves_of
from flagscale.bench.collectives.plots import write_plot
from flagscale.bench.collectives.records import Row, hold, limits_of, write_json
from flagscale.bench.collectives.report import write_report
from flagscale.bench.collectives.session import Listener
from flagscale.bench.collectives.spec import BenchSpec, Case
from flagscale.bench.collectives.table import Table, table

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


class Presenter(Listener):
    """Hears of every size as it is measured. Use as a context, so that files are written and the
    terminal is left in order however the run ends."""

    def __init__(
        self, spec: BenchSpec, kept: Kept, header: Sequence[str], about: Mapping[str, Any]
    ) -> None:
        self.all_rows: list[Row] = []
        self._spec, self._kept, self._header, self._about = spec, kept, header, about
        self._table: Table | None = None
        self._rows: list[Row] = []
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._many = False

    def __enter__(self) -> Presenter:
        if self._spec.output.header:
            for line in self._header:
                print(f"# {line}")
        for note in self._spec.notes:
            self.note(note)
        # The table itself must stay on a terminal and in a pipe alike, so progress goes elsewhere.
        if self._spec.output.interactive and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            # Never refreshed by a thread of its own, which would disturb the timing.
            self._progress = Progress(
                *columns, console=Console(stderr=True), auto_refresh=False, transient=True
            )
            self._progress.start()
        sys.stdout.flush()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._save(complete=kind is None)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        self._print([f"# note: {text}"])

    def sample(self, text: str) -> None:
        self._print([f"# {text}"])

    def series(self, cases: Sequence[Case], sizes: int, backends: int) -> None:
        op = cases[0].operation
        spec = self._spec
        types = [t.name for t in spec.types]
        self._table = table(spec, types, parts=op.parts, backends=backends)
        self._rows = []
        # One operation needs no title: nccom-test prints none.
        several = self._several()
        title = [f"# {cases[0].label.removesuffix(' in place')}"] if several else []
        self._print([*title, *self._table.head()])
        if self._progress is not None:
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._task = self._progress.add_task(cases[0].label, total=sizes)
            self._progress.refresh()

    def rows(self, rows: Sequence[Row]) -> None:
        self._rows += rows
        self.all_rows += rows
        self._kept.add(rows, self._spec)
        if self._table is not None:
            self._print(self._table.lines(rows))
        if self._progress is not None:
            self._progress.advance(self._task)
            self._progress.refresh()
        # A run that is cut short has left all it measured.
        self._save(complete=False)

    def end_series(self) -> None:
        if self._table is not None:
            self._print(self._table.foot(self._rows))

    def _several(self) -> bool:
        spec = self._spec
        counts = (spec.operations, spec.types, spec.reductions, spec.roots)
        return any(len(c) > 1 for c in counts) or -1 in spec.roots

    def _print(self, lines: Sequence[str]) -> None:
        if self._progress is not None:
            self._progress.stop()
        for line in lines:
            print(line)
        sys.stdout.flush()
        if self._progress is not None:
            self._progress.start()

    def _save(self, *, complete: bool) -> None:
        path = self._spec.output.json
        if path is not None:
            write_json(path, self._kept.of(path), self._about, complete=complete)


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
