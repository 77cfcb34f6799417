"""Output of rank 0 for ``flagscale bench collectives``: header, tables, progress, and result files.

:class:`Presenter` is the listener of :class:`.session.Session` on rank 0.
"""

from __future__ import annotations

import os
import platform
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from flagscale import __version__
from flagscale.bench.collectives.curves import make_curves, write_plot
from flagscale.bench.collectives.patterns import Groups
from flagscale.bench.collectives.records import (
    ResultRow,
    compare_with_baseline,
    find_limits,
    select_variables,
    write_csv,
    write_json,
)
from flagscale.bench.collectives.report import render
from flagscale.bench.collectives.session import ResultListener
from flagscale.bench.collectives.spec import Average, BenchSpec, Case
from flagscale.bench.collectives.table import Table, make_table
from flagscale.bench.machine import describe_hardware
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry
from flagscale.hosts.names import format_ranges


@dataclass(frozen=True)
class RankDescription:
    """Description of one rank for the header, or the reason why it cannot take part."""

    rank: int
    host: str
    pid: int
    device: str
    torch_device: str
    """torch's name of the device, such as ``cuda:0``."""
    error: str | None = None
    """Reason why this rank cannot take part."""
    exit_code: int = 0
    """Exit code for this reason."""


def package_versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    versions = {"flagscale": __version__, "torch": torch.__version__}
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {**versions, "python": platform.python_version(), **cuda}


def describe_topology(descriptions: Sequence[RankDescription]) -> str:
    """Return a description such as ``8 ranks on 2 hosts: a [0-3] 4 x NVIDIA H200, b [4-7] 4 x
    NVIDIA H200``.
    """
    hosts: dict[str, list[RankDescription]] = {}
    for description in descriptions:
        hosts.setdefault(description.host, []).append(description)
    host_texts = []
    for host, ranks in hosts.items():
        names = {rank.device for rank in ranks}
        devices = ", ".join(
            f"{sum(rank.device == name for rank in ranks)} x {name}" for name in sorted(names)
        )
        host_texts.append(f"{host} [{format_ranges([rank.rank for rank in ranks])}] {devices}")
    rank_count, host_count = len(descriptions), len(hosts)
    rank_text = f"{rank_count} rank{'s' if rank_count > 1 else ''}"
    host_text = f"{host_count} host{'s' if host_count > 1 else ''}"
    return f"{rank_text} on {host_text}: {'; '.join(host_texts)}"


_AVERAGE_TEXTS: dict[Average, str] = {
    "rank0": "of rank 0",
    "mean": "mean over ranks",
    "min": "minimum over ranks",
    "max": "maximum over ranks",
}


def describe_conditions(
    spec: BenchSpec,
    world: BenchWorld,
    descriptions: Sequence[RankDescription],
    backends: Sequence[str],
    groups: Groups,
) -> list[str]:
    """Return the lines on the conditions of a run, without comment signs."""
    unit_bytes = "1e9" if spec.output.unit == "GB" else "2**30"
    clock = "time to issue" if spec.cpu_time else "wall clock / iterations"
    iterations = spec.iterations
    versions = _backend_versions(backends)
    backend_texts = []
    for name, backend in zip(spec.backends, backends, strict=True):
        options = ", ".join(f"{option}={value}" for option, value in spec.options_of(name).items())
        words = (backend, versions.get(backend), options and f"({options})")
        backend_texts.append(" ".join(filter(None, words)))
    lines = [
        " ".join(f"{name} {version}" for name, version in package_versions().items()),
        f"backend {', '.join(backend_texts)}; {describe_topology(descriptions)}; "
        f"started by {world.launcher}",
        f"unit {spec.output.unit}/s = {unit_bytes} bytes per second; time: {clock}, "
        f"{_AVERAGE_TEXTS[spec.average]}; percentiles: of each iteration's slowest rank",
        f"{iterations.measured} iterations after {iterations.warmup}"
        + (f", {iterations.replays} times" if iterations.replays else "")
        + (f", {iterations.aggregated} operations each" if iterations.aggregated > 1 else "")
        + (f"; checked: {spec.check.mode}, seed {spec.check.seed}" if spec.check.mode else ""),
    ]
    if len(groups) > 1 or len(groups[0]) != world.size:
        first_groups = " ".join(f"[{format_ranges(group)}]" for group in groups[:8])
        lines.append(
            f"{len(groups)} groups at once: {first_groups}{' ...' if len(groups) > 8 else ''}"
        )
    return lines


def _backend_versions(backends: Sequence[str]) -> dict[str, str]:
    """Return the versions of those backends that have one."""
    versions = {name: registry.get_backend(name).version() for name in backends}
    return {name: version for name, version in versions.items() if version}


def list_rank_devices(descriptions: Sequence[RankDescription]) -> list[str]:
    """Return nccl-tests' list of devices."""
    return [
        f"Rank {d.rank:>2} Group  0 Pid {d.pid:>6} on {d.host:>10} device "
        f"{d.torch_device} {d.device}"
        for d in descriptions
    ]


def make_record(
    spec: BenchSpec, descriptions: Sequence[RankDescription], backends: Sequence[str]
) -> dict[str, Any]:
    """Return the record of the conditions for a JSON file."""
    return {
        "config": {
            "prog": spec.prog,
            "command": list(spec.command),
            "backends": list(backends),
            "options": dict(spec.backend_options),
            "ranks": len(descriptions),
            "iterations": asdict(spec.iterations),
            "average": spec.average,
            "timing": "cpu" if descriptions[0].torch_device == "cpu" else spec.timing,
            "check": spec.check.mode,
            "seed": spec.check.seed,
            "bandwidth_unit": "1e9 bytes per second",
        },
        "environment": {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {**package_versions(), **_backend_versions(backends)},
            **describe_hardware(),
            "topology": describe_topology(descriptions),
            "devices": sorted({f.device for f in descriptions}),
            "variables": select_variables(os.environ),
        },
    }


RowsByFile = defaultdict[Path, list[ResultRow]]
"""Rows of every file. Lines of a batch may name the same file, which receives the rows of all."""


class Presenter(ResultListener):
    """Prints the rows of every size when it has been measured. As a context manager it writes the
    JSON file and restores the terminal also if the run fails.

    Args:
        spec: specification of the run.
        rows_by_file: rows of each result file, including those of earlier lines of a batch.
        header: lines on the conditions of the run.
        conditions: record of the conditions for the result files.
    """

    def __init__(
        self,
        spec: BenchSpec,
        rows_by_file: RowsByFile,
        header: Sequence[str],
        conditions: Mapping[str, Any],
    ) -> None:
        self._all_rows: list[ResultRow] = []
        self._spec = spec
        self._rows_by_file = rows_by_file
        self._header = header
        self._conditions = conditions
        self._table: Table = make_table(spec, (), has_shards=False)
        self._rows: list[ResultRow] = []
        # stdout is for the table, so progress goes to stderr. Refreshing by a thread would disturb
        # the timing.
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
        self._write_json(complete=kind is None)
        sys.stdout.flush()

    def on_note(self, text: str) -> None:
        self._print([f"# {text}"])

    def on_series(self, cases: Sequence[Case], size_count: int, backend_count: int) -> None:
        spec = self._spec
        types = [t.name for t in spec.types]
        has_shards = cases[0].operation.has_shards
        self._table = make_table(spec, types, has_shards=has_shards, backend_count=backend_count)
        self._rows = []
        # One operation needs no title: nccom-test prints none.
        counts = (spec.operations, spec.types, spec.reductions, spec.roots)
        has_title = any(len(c) > 1 for c in counts) or -1 in spec.roots
        title = [f"# {cases[0].label.removesuffix(' in place')}"] if has_title else []
        self._print([*title, *self._table.head()])
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._task = self._progress.add_task(cases[0].label, total=size_count)
        self._progress.refresh()

    def on_rows(self, rows: Sequence[ResultRow]) -> None:
        files = {path.absolute() for path in self._spec.output.files}
        for row_list in (self._rows, self._all_rows, *(self._rows_by_file[path] for path in files)):
            row_list.extend(rows)
        self._print(self._table.lines(rows))
        self._progress.advance(self._task)
        self._progress.refresh()
        # The file has all results so far if the run is interrupted.
        self._write_json(complete=False)

    def on_series_end(self) -> None:
        self._print(self._table.foot(self._rows))

    def finish(self) -> int:
        """Write the plots, the CSV file and the report, and return the exit code.

        Returns:
            0, 1 (a row failed), 2 (the baseline has none of the rows) or 4 (slower than the
            baseline).

        Raises:
            OSError: a file cannot be written.
        """
        output = self._spec.output
        for path in output.plots:
            rows = self._rows_by_file[path.absolute()]
            write_plot(path, [*make_curves(rows), *output.imported_curves], find_limits(rows))
        if output.csv is not None:
            write_csv(output.csv, self._rows_by_file[output.csv.absolute()])
        if output.report is not None:
            rows = self._rows_by_file[output.report.absolute()]
            curves = [*make_curves(rows), *output.imported_curves]
            page = render(rows, curves, self._header, self._conditions)
            output.report.write_text(page, encoding="utf-8")
        if any(not row.ok for row in self._all_rows):
            return 1
        return self._compare_with_baseline()

    def _compare_with_baseline(self) -> int:
        baseline = self._spec.comparison.baseline
        if baseline is None:
            return 0
        compared, slower = compare_with_baseline(
            self._all_rows, baseline, self._spec.comparison.tolerance
        )
        if not compared:
            text = f"error: --baseline {baseline.path}: it has none of the measured rows"
            print(text, file=sys.stderr)
            return 2
        for line in slower:
            print(f"worse: {line}", file=sys.stderr)
        print(f"# baseline: {compared} compared, {len(slower)} worse", flush=True)
        return 4 if slower else 0

    def _print(self, lines: Sequence[str]) -> None:
        self._progress.stop()
        for line in lines:
            print(line)
        sys.stdout.flush()
        self._progress.start()

    def _write_json(self, *, complete: bool) -> None:
        path = self._spec.output.json
        if path is not None:
            write_json(
                path, self._rows_by_file[path.absolute()], self._conditions, complete=complete
            )
