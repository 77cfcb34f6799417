"""List the user's runs: ``flagscale runs``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flagscale.config.schema import Options
from flagscale.errors import ConfigError, FlagscaleError
from flagscale.hosts.names import compress_names
from flagscale.launcher import runs, sweep_runs
from flagscale.launcher.run_filter import EVERY_RUN, RunFilter
from flagscale.launcher.runs import Outcome
from flagscale.launcher.snapshot import Phase
from flagscale.launcher.state import RunState, reload_state
from flagscale.launcher.sweep_runs import StoredSweep, write_csv_file
from flagscale.tables import FittingTable

if TYPE_CHECKING:
    from rich.table import Table

_MIN_COLUMN_WIDTH = 16
# Runs that ended longer ago are listed only on request.
_RECENT_SECONDS = 2 * 24 * 3600.0


@dataclass(frozen=True)
class RunRow:
    """Current state of a run; ``trouble`` is the reason if it could not be queried."""

    state: RunState
    outcome: Outcome
    trouble: str = ""

    def to_json(self) -> dict[str, Any]:
        state, outcome = self.state, self.outcome
        return {
            "run_id": state.run_id,
            "name": state.name,
            "state": outcome.phase,
            "since": outcome.since,
            "started": state.started,
            "step": outcome.step,
            "job": state.job,
            "hosts": [host.name for host in state.hosts],
            "exp_dir": str(state.exp_dir),
            "there": state.exp_dir.exists(),
            "failures": [{"attempt": n, "failure": text} for n, text in outcome.failures],
            "trouble": self.trouble,
        }


def list_runs(
    run: str | None,
    *,
    include_old: bool = False,
    as_json: bool = False,
    csv_file: Path | None = None,
    run_filter: RunFilter = EVERY_RUN,
) -> int:
    """List runs, newest first.

    Without a filter these are live ones and those that ended recently, or with ``include_old`` all.
    Given a run, or the YAML it was started from, list every run of that experiment with the
    failures of its attempts; given the directory of a sweep, the table of the sweep.

    Raises:
        ConfigError: the CSV file cannot be written, or the filter does not apply to a sweep.
    """
    sweep = None if run is None else sweep_runs.find_sweep(run)
    if sweep is not None:
        return _list_sweep(sweep, as_json, csv_file, run_filter)
    entries = list(_select_entries(run))
    if not entries and run is not None:
        print(f"no run was started from {run}", file=sys.stderr)
        return 1
    only_recent = run is None and not include_old and run_filter == EVERY_RUN
    if only_recent:
        run_filter = RunFilter(since=time.time() - _RECENT_SECONDS)
    rows = _query_rows(entries, run_filter)
    if csv_file is not None:
        _write_csv(rows, csv_file)
    if as_json:
        print(json.dumps([row.to_json() for row in rows], indent=2, ensure_ascii=False))
        return 0
    if not rows:
        recent = "no run is alive or has ended recently; --all shows older ones"
        print(recent if only_recent else "no such run")
        return 0
    _print_rows(rows, with_failures=run is not None)
    return 0


def _list_sweep(
    sweep: StoredSweep, as_json: bool, csv_file: Path | None, run_filter: RunFilter
) -> int:
    if run_filter != RunFilter(run_filter.states):
        raise ConfigError(f"{sweep.directory} is a sweep: only --state selects some of its runs")
    sweep.query()
    selected = [run for run in sweep.runs if run.phase in (run_filter.states or (run.phase,))]
    if not selected:
        print("no such run")
        return 0
    csv_path = None if csv_file is None else str(csv_file)
    sweep_runs.print_sweep(selected, Options(json=as_json, csv=csv_path))
    return 0


def _query_rows(entries: Sequence[runs.RunEntry], run_filter: RunFilter) -> list[RunRow]:
    """Return the selected runs, newest first. No more hosts are queried than necessary."""
    entries = [entry for entry in entries if run_filter.accepts_run(entry.state)]
    entries.sort(key=lambda entry: (entry.state.started, entry.state.run_id), reverse=True)
    if not run_filter.states and run_filter.since is None:
        entries = entries[: run_filter.limit]
    with ThreadPoolExecutor(runs.PARALLEL_QUERIES) as pool:
        rows = list(pool.map(_query_row, entries))
    selected = [
        row for row in rows if run_filter.accepts_phase(row.outcome.phase, row.outcome.since)
    ]
    return selected[: run_filter.limit]


def _write_csv(rows: Sequence[RunRow], path: Path) -> None:
    names = ("run_id", "name", "state", "step", "started", "job", "hosts", "exp_dir")
    records = ({**row.to_json(), "hosts": " ".join(row.to_json()["hosts"])} for row in rows)
    write_csv_file(path, names, ([record[name] for name in names] for record in records))


def _select_entries(run: str | None) -> Iterator[runs.RunEntry]:
    """Yield the runs to list, including unregistered ones on this machine."""
    all_entries = runs.find_all_runs()
    if run is None:
        yield from all_entries
        return
    path = Path(run).absolute()
    state = None if path.is_file() else runs.find_run(run)
    registered_ids = {entry.state.run_id for entry in all_entries}
    # Runs that were started on another machine are recorded in their directory alone.
    for history_state in runs.find_history(state.exp_dir) if state is not None else ():
        if history_state.run_id not in registered_ids:
            yield runs.RunEntry(history_state)
    for entry in all_entries:
        same = state is not None and entry.state.exp_dir == state.exp_dir
        if same or entry.config in (str(path), f"{path}.yaml"):
            yield entry


def _query_row(entry: runs.RunEntry) -> RunRow:
    """Return the state of a run; its hosts are queried unless it is known to have ended."""
    state = reload_state(entry.state)
    if entry.ended is not None:
        return RunRow(state, entry.ended)
    try:
        return RunRow(state, Outcome.from_snapshot(runs.query_run(state)))
    except FlagscaleError as error:
        return RunRow(state, Outcome(Phase.UNREACHABLE.value, state.started), error.message)


def _print_rows(rows: Sequence[RunRow], *, with_failures: bool) -> None:
    from flagscale.launcher.show import view

    table = FittingTable(_make_table(rows), min_text_width=_MIN_COLUMN_WIDTH)
    view.make_console().print(table)
    for row in rows:
        if row.trouble:
            print(f"note: {row.state.run_id}: {row.trouble}", file=sys.stderr)
        for number, text in row.outcome.failures if with_failures else ():
            print(f"{row.state.run_id} attempt {number}: {text}")


def _make_table(rows: Sequence[RunRow]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from flagscale.launcher.show import view

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    has_jobs = any(row.state.job for row in rows)
    jobs = ("job",) if has_jobs else ()
    for heading in ("run", *jobs, "name", "state", "step", "age", "hosts", "directory"):
        table.add_column(heading, no_wrap=heading in ("run", "job", "age"), overflow="fold")
    for row in rows:
        state = row.state
        suffix = "" if state.exp_dir.exists() else " (gone)"
        table.add_row(
            state.run_id,
            *((state.job,) if has_jobs else ()),
            Text(state.name),
            Text(row.outcome.phase, view.STYLES[Phase(row.outcome.phase)]),
            row.outcome.step,
            view.format_duration(time.time() - state.started) if state.started else "?",
            Text(compress_names(host.name for host in state.hosts)),
            Text(f"{state.exp_dir}{suffix}"),
        )
    return table
