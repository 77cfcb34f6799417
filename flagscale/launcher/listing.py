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

from flagscale.errors import FlagscaleError
from flagscale.hosts.names import compress_names
from flagscale.launcher import runs
from flagscale.launcher.runs import Outcome
from flagscale.launcher.snapshot import Phase
from flagscale.launcher.state import RunState, reload_state
from flagscale.tables import FittingTable

if TYPE_CHECKING:
    from rich.table import Table

_PARALLEL_QUERIES = 8
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
            "hosts": [host.name for host in state.hosts],
            "exp_dir": str(state.exp_dir),
            "there": state.exp_dir.exists(),
            "failures": [{"attempt": n, "failure": text} for n, text in outcome.failures],
            "trouble": self.trouble,
        }


def list_runs(run: str | None, *, include_old: bool, as_json: bool) -> int:
    """List runs: live ones and those that ended recently, or with ``include_old`` all of them.

    Given a run, or the YAML it was started from, list every run of that experiment with the
    failures of its attempts.
    """
    entries = list(_select_entries(run))
    if not entries and run is not None:
        print(f"no run was started from {run}", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(_PARALLEL_QUERIES) as pool:
        rows = list(pool.map(_query_row, entries))
    if run is None and not include_old:
        since = time.time() - _RECENT_SECONDS
        rows = [
            row for row in rows if not Phase(row.outcome.phase).ended or row.outcome.since > since
        ]
    if as_json:
        print(json.dumps([row.to_json() for row in rows], indent=2, ensure_ascii=False))
        return 0
    if not rows:
        older = "" if include_old else "; --all shows older ones"
        print(f"no run is alive or has ended recently{older}")
        return 0
    _print_rows(rows, with_failures=run is not None)
    return 0


def _select_entries(run: str | None) -> Iterator[runs.RunEntry]:
    """Yield the runs to list, oldest first, including unregistered ones on this machine."""
    all_entries = runs.find_all_runs()
    if run is None:
        yield from all_entries
        return
    path = Path(run).absolute()
    state = None if path.is_file() else runs.find_run(run)
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
    for heading in ("run", "name", "state", "step", "age", "hosts", "directory"):
        table.add_column(heading, no_wrap=heading in ("run", "age"), overflow="fold")
    for row in rows:
        state = row.state
        suffix = "" if state.exp_dir.exists() else " (gone)"
        table.add_row(
            state.run_id,
            Text(state.name),
            Text(row.outcome.phase, view.STYLES[Phase(row.outcome.phase)]),
            row.outcome.step,
            view.format_duration(time.time() - state.started) if state.started else "?",
            Text(compress_names(host.name for host in state.hosts)),
            Text(f"{state.exp_dir}{suffix}"),
        )
    return table
