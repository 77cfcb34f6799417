"""Runs of a sweep: the record in its directory, their results, and the best of them.

A sweep's directory holds one directory per run and ``sweep.json``, which lists them with their
swept values. Sweeps of the same experiment share the directory and the record.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flagscale.config.schema import Options
from flagscale.config.sweeps import leaf_of, short_key_names
from flagscale.errors import ConfigError, FlagscaleError, RunStateError
from flagscale.files import (
    make_private_directory,
    read_json,
    require_trusted_file,
    strict_json,
    to_plain,
    write_atomic,
    write_json,
)
from flagscale.launcher.layout import Layout
from flagscale.launcher.runs import PARALLEL_QUERIES, query_run
from flagscale.launcher.snapshot import Phase, Snapshot, take_snapshot
from flagscale.launcher.state import RunState, load_states
from flagscale.records import from_record

if TYPE_CHECKING:
    from rich.table import Table

SWEEP_FILE = "sweep.json"
PHASE_NOT_STARTED = "not started"
_SIGTERM_EXIT_CODE = 143
_METRICS = ("step", "loss", "validation_loss", "tokens_per_second")


@dataclass(kw_only=True, eq=False)
class SweepRun:
    """Run of a sweep.

    ``values`` has the text of each swept value by dotted key. ``failure_reason`` is the reason why
    it was not started or failed. ``exit_code`` is the exit code that the command would have had for
    this run alone.
    """

    values: Mapping[str, str]
    exp_dir: Path
    state: RunState | None = None
    snapshot: Snapshot | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Last known metrics, by name."""
    failure_reason: str = ""
    exit_code: int = 0

    def __str__(self) -> str:
        return " ".join(f"{leaf_of(key)}={text}" for key, text in self.values.items())

    @property
    def phase(self) -> str:
        return self.snapshot.phase.value if self.snapshot is not None else PHASE_NOT_STARTED

    def record_start(self, state: RunState) -> None:
        self.state = state

    def record_snapshot(self, snapshot: Snapshot) -> None:
        """Record the last snapshot."""
        self.snapshot = snapshot
        self.metrics = {name: getattr(snapshot, name) for name in _METRICS}
        if snapshot.failure is not None:
            self.failure_reason = snapshot.failure.headline()
        if snapshot.phase is Phase.STOPPED:
            self.exit_code = snapshot.exit_code or _SIGTERM_EXIT_CODE
        elif snapshot.phase in (Phase.FAILED, Phase.LOST):
            self.exit_code = snapshot.exit_code or 1

    def query(self) -> None:
        """Record the current state of the last run in the directory.

        Its metrics are those of an earlier run there if it has reported none.
        """
        try:
            states = load_states(Layout(self.exp_dir))
        except RunStateError as error:
            self.failure_reason = error.message
            return
        if not states:
            return
        self.state = states[-1]
        try:
            self.record_snapshot(query_run(self.state))
        except FlagscaleError as error:
            self.record_snapshot(take_snapshot(self.state, {}))
            self.failure_reason = error.message
        for earlier_state in reversed(states[:-1]):
            if self.metrics.get("step") is not None:
                return
            earlier_snapshot = take_snapshot(earlier_state, {})
            self.metrics = {name: getattr(earlier_snapshot, name) for name in _METRICS}

    def to_json(self) -> dict[str, Any]:
        return {
            "values": dict(self.values),
            "state": self.phase,
            "run_id": self.state.run_id if self.state is not None else None,
            **{name: self.metrics.get(name) for name in _METRICS},
            "exit_code": self.exit_code,
            "trouble": self.failure_reason,
            "exp_dir": str(self.exp_dir),
        }


class Best(NamedTuple):
    """Best run of a sweep, and the metric by which it is the best, for display."""

    run: SweepRun
    metric: str
    value: float

    def describe(self) -> str:
        """Return a sentence that names the run and the metric."""
        return f"the best of the completed runs by {self.metric} ({self.value:.4f}): {self.run}"


def find_best(sweep_runs: Sequence[SweepRun]) -> Best | None:
    """Return the best completed run: by its last validation loss if all have one, otherwise by its
    last training loss. None if no completed run has a loss.
    """
    for name, metric in (("validation_loss", "validation loss"), ("loss", "training loss")):
        completed = [run for run in sweep_runs if run.phase == Phase.COMPLETED.value]
        candidates = [run for run in completed if _is_finite(run.metrics.get(name))]
        with_loss = [run for run in completed if _is_finite(run.metrics.get("loss"))]
        if candidates and (name == "loss" or set(candidates) >= set(with_loss)):
            best_run = min(candidates, key=lambda run: float(run.metrics[name]))
            return Best(best_run, metric, float(best_run.metrics[name]))
    return None


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# -- record -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RecordedRun:
    directory: str
    """Name of its directory in that of the sweep."""
    values: dict[str, str]


@dataclass(frozen=True)
class _SweepRecord:
    config_file: str
    runs: tuple[_RecordedRun, ...]


@dataclass(frozen=True)
class StoredSweep:
    """Sweep as recorded in its directory, with runs that may not have been started."""

    directory: Path
    config_file: str
    runs: Sequence[SweepRun]

    @property
    def name(self) -> str:
        return self.directory.name

    def query(self) -> None:
        """Query the current state of all runs."""
        with ThreadPoolExecutor(PARALLEL_QUERIES) as pool:
            list(pool.map(SweepRun.query, self.runs))


def record_sweep(config_file: Path, sweep_runs: Sequence[SweepRun]) -> None:
    """Add runs to the record of the sweep in the directory above theirs.

    Nothing is written if their directories have different parents, or if it fails: the runs
    themselves report a disk that is full.
    """
    parents = {run.exp_dir.parent for run in sweep_runs}
    if len(parents) != 1:
        return
    (directory,) = parents
    record = _read_record(directory)
    recorded_runs = {run.directory: run for run in record.runs} if record is not None else {}
    for run in sweep_runs:
        recorded_runs[run.exp_dir.name] = _RecordedRun(run.exp_dir.name, dict(run.values))
    new_record = _SweepRecord(str(config_file), tuple(recorded_runs.values()))
    with suppress(OSError):
        make_private_directory(directory)
        write_json(directory / SWEEP_FILE, to_plain(new_record), durable=False)


def find_sweep(text: str) -> StoredSweep | None:
    """Return the sweep that a text names, or None.

    The text is the directory of a sweep, or its ``sweep.json``. A directory in which runs were
    started itself is not a sweep's, and a note names the file to use for the sweep below it.

    Raises:
        RunStateError: the record is unreadable, or another user could have written it.
    """
    path = Path(text).absolute()
    directory = path.parent if path.name == SWEEP_FILE else path
    if not (directory / SWEEP_FILE).is_file():
        return None
    if path == directory and Layout(directory).state.exists():
        note = f"{directory} also holds a sweep: {directory / SWEEP_FILE} names it"
        print(f"note: {note}", file=sys.stderr)
        return None
    record = _read_record(directory)
    if record is None:
        raise RunStateError(
            f"{directory / SWEEP_FILE} is damaged", hint="start the sweep again to have it written"
        )
    keys = dict.fromkeys(key for run in record.runs for key in run.values)
    sweep_runs = [
        SweepRun(
            values={key: run.values.get(key, "") for key in keys}, exp_dir=directory / run.directory
        )
        for run in record.runs
    ]
    return StoredSweep(directory, record.config_file, sweep_runs)


def _read_record(directory: Path) -> _SweepRecord | None:
    path = directory / SWEEP_FILE
    if not path.exists():
        return None
    try:
        require_trusted_file(path, directory)
    except PermissionError as error:
        raise RunStateError(f"{path} {error.strerror}: it is not used for a sweep") from None
    record = from_record(_SweepRecord, read_json(path))
    is_valid = record is not None and all(
        run.directory not in ("", ".", "..") and "/" not in run.directory for run in record.runs
    )
    return record if is_valid and record is not None and record.runs else None


# -- results ----------------------------------------------------------------------------------


def print_sweep(sweep_runs: Sequence[SweepRun], options: Options) -> None:
    """Print the results of runs in the order of their values, and write them to ``options.csv``."""
    if options.csv is not None:
        write_csv(sweep_runs, Path(options.csv))
    best = find_best(sweep_runs)
    if options.json:
        records = [
            {**run.to_json(), "best": best is not None and run is best.run} for run in sweep_runs
        ]
        print(strict_json(records, 2), flush=True)
        return
    headings = ("state", "step", "loss", "validation", "tokens/s", "run", "directory")
    cells = [_result_cells(run) for run in sweep_runs]
    columns = [i for i in range(len(headings)) if i != 3 or any(row[i] for row in cells)]
    print_sweep_table(
        sweep_runs,
        [headings[i] for i in columns],
        [[row[i] for i in columns] for row in cells],
        best=best.run if best is not None else None,
    )
    if best is not None:
        print(f"* {best.describe()}")
    for run in sweep_runs:
        if run.failure_reason:
            print(f"{run}: {run.failure_reason}", file=sys.stderr)


def print_sweep_table(
    sweep_runs: Sequence[SweepRun],
    headings: Sequence[str],
    cells: Sequence[Sequence[str]],
    best: SweepRun | None = None,
) -> None:
    """Print a table of runs: the values of each, and the given cells. ``*`` marks the best."""
    from flagscale.launcher.show import view
    from flagscale.tables import FittingTable

    view.make_console().print(FittingTable(_make_table(sweep_runs, headings, cells, best)))


def _make_table(
    sweep_runs: Sequence[SweepRun],
    headings: Sequence[str],
    cells: Sequence[Sequence[str]],
    best: SweepRun | None,
) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from flagscale.launcher.show import view

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    keys = short_key_names(list(sweep_runs[0].values)).values()
    for heading in (*(("",) if best is not None else ()), *keys, *headings):
        table.add_column(heading, no_wrap=heading != "directory", overflow="fold")
    for run, texts in zip(sweep_runs, cells, strict=True):
        style = view.STYLES[run.snapshot.phase] if run.snapshot is not None else ""
        mark = (Text("*" if run is best else "", "bold green"),) if best is not None else ()
        state = (Text(text, style if text == run.phase else "") for text in texts)
        table.add_row(*mark, *map(Text, run.values.values()), *state)
    return table


def _result_cells(run: SweepRun) -> list[str]:
    step, loss, validation_loss, tokens_per_second = map(run.metrics.get, _METRICS)
    return [
        run.phase,
        "" if step is None else f"{step}",
        "" if loss is None else f"{loss:.4f}",
        "" if validation_loss is None else f"{validation_loss:.4f}",
        "" if tokens_per_second is None else f"{tokens_per_second:,.0f}",
        run.state.run_id if run.state is not None else "",
        str(run.exp_dir),
    ]


def write_csv(sweep_runs: Sequence[SweepRun], path: Path) -> None:
    """Write the results of runs as CSV: a column per swept key and per metric.

    Raises:
        ConfigError: the file cannot be written.
    """
    best = find_best(sweep_runs)
    names = ("state", *_METRICS, "best", "run_id", "exp_dir")
    rows = []
    for run in sweep_runs:
        record = {**run.to_json(), "best": int(best is not None and run is best.run)}
        rows.append([*run.values.values(), *(record[name] for name in names)])
    write_csv_file(path, [*sweep_runs[0].values, *names], rows)


def write_csv_file(path: Path, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a private CSV file.

    Raises:
        ConfigError: it cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows(rows)
    try:
        write_atomic(path.absolute(), text.getvalue(), durable=False)
    except OSError as error:
        raise ConfigError(f"{path}: the table cannot be written: {error.strerror}") from error
