"""Rank 0's voice: header, tables, progress, and the files a run leaves."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
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


Kept = defaultdict[Path, list[Row]]
"""The rows of every file. Lines of a batch may name the same one: it gets the rows of all."""


class Presenter(Listener):
    """Hears of every size as it is measured. Use as a context, so that files are written and the
    terminal is left in order however the run ends."""

    def __init__(
        self, spec: BenchSpec, kept: Kept, header: Sequence[str], about: Mapping[str, Any]
    ) -> None:
        self._all_rows: list[Row] = []
        self._spec, self._kept, self._header, self._about = spec, kept, header, about
        self._table: Table = table(spec, (), parts=False)
        self._rows: list[Row] = []
        # The table itself must stay on a terminal and in a pipe alike, so progress goes elsewhere.
        # Never refreshed by a thread of its own, which would disturb the timing.
        self._progress = Progress(
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            disable=not (spec.output.interactive and sys.stderr.isatty()),
        )
        self._task = TaskID(0)

    def __enter__(self) -> Presenter:
        if self._spec.output.header:
            for line in self._header:
                print(f"# {line}")
        for note in self._spec.notes:
            print(f"# note: {note}")
        sys.stdout.flush()
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress.stop()
        self._save(complete=kind is None)
        sys.stdout.flush()

    def say(self, text: str) -> None:
        self._print([f"# {text}"])

    def series(self, cases: Sequence[Case], sizes: int, backends: int) -> None:
        spec = self._spec
        types = [t.name for t in spec.types]
        self._table = table(spec, types, parts=cases[0].operation.parts, backends=backends)
        self._rows = []
        # One operation needs no title: nccom-test prints none.
        counts = (spec.operations, spec.types, spec.reductions, spec.roots)
        several = any(len(c) > 1 for c in counts) or -1 in spec.roots
        title = [f"# {cases[0].label.removesuffix(' in place')}"] if several else []
        self._print([*title, *self._table.head()])
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._task = self._progress.add_task(cases[0].label, total=sizes)
        self._progress.refresh()

    def rows(self, rows: Sequence[Row]) -> None:
        files = {path.absolute() for path in self._spec.output.files}
        for kept in (self._rows, self._all_rows, *(self._kept[path] for path in files)):
            kept.extend(rows)
        self._print(self._table.lines(rows))
        self._progress.advance(self._task)
        self._progress.refresh()
        # A run that is cut short has left all it measured.
        self._save(complete=False)

    def end_series(self) -> None:
        self._print(self._table.foot(self._rows))

    def finish(self) -> int:
        """Write what was asked for and judge the run: 0, 1 (a row failed) or 4 (worse than before).

        Raises:
            OSError: a file cannot be written.
        """
        output = self._spec.output
        for path in output.plots:
            own = self._kept[path.absolute()]
            write_plot(path, [*curves_of(own), *output.imports], limits_of(own))
        if output.report is not None:
            own = self._kept[output.report.absolute()]
            curves = [*curves_of(own), *output.imports]
            write_report(output.report, own, curves, self._header, self._about)
        if any(not row.ok for row in self._all_rows):
            return EXIT_FAILED
        return self._against_baseline()

    def _against_baseline(self) -> int:
        baseline = self._spec.comparison.baseline
        if baseline is None:
            return 0
        held = hold(self._all_rows, baseline, self._spec.comparison.tolerance)
        if not held.compared:
            text = f"error: --baseline {baseline.path}: none of its rows is one of these"
            print(text, file=sys.stderr)
            return 2
        for line in held.worse:
            print(f"worse: {line}", file=sys.stderr)
        print(f"# baseline: {held.compared} compared, {len(held.worse)} worse", flush=True)
        return EXIT_WORSE if held.worse else 0

    def _print(self, lines: Sequence[str]) -> None:
        self._progress.stop()
        for line in lines:
            print(line)
        sys.stdout.flush()
        self._progress.start()

    def _save(self, *, complete: bool) -> None:
        path = self._spec.output.json
        if path is not None:
            write_json(path, self._kept[path.absolute()], self._about, complete=complete)
