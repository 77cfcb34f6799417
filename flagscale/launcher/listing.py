"""``flagscale runs``: what the user has started, wherever it is, and what became of it."""

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
from flagscale.hosts.names import compress
from flagscale.launcher import runs
from flagscale.launcher.runs import Outcome
from flagscale.launcher.snapshot import Phase
from flagscale.launcher.state import RunState, latest

if TYPE_CHECKING:
    from rich.table import Table

_ASKED_AT_ONCE = 8
# Runs that have ended are history after this; before, somebody may wonder what became of them.
_RECENT_SECONDS = 2 * 24 * 3600.0


@dataclass(frozen=True)
class Row:
    """A run as it is now; ``trouble``: why that could not be found out."""

    state: RunState
    seen: Outcome
    trouble: str = ""

    def to_json(self) -> dict[str, Any]:
        state, seen = self.state, self.seen
        return {
            "run_id": state.run_id,
            "name": state.name,
            "state": seen.phase,
            "since": seen.since,
            "started": state.started,
            "step": seen.step,
            "hosts": [host.name for host in state.hosts],
            "exp_dir": str(state.exp_dir),
            "there": state.exp_dir.exists(),
            "failures": [{"attempt": n, "failure": text} for n, text in seen.failures],
            "trouble": self.trouble,
        }


def show(run: str | None, *, everything: bool, as_json: bool) -> int:
    """List runs: those that live or have ended lately, ``everything``, or, given a run or what it
    was started of, every one of that experiment with the failures of its attempts."""
    found = list(_chosen(run))
    if not found and run is not None:
        print(f"no run was started of {run}", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        rows = list(pool.map(_row, found))
    if run is None and not everything:
        since = time.time() - _RECENT_SECONDS
        rows = [row for row in rows if not Phase(row.seen.phase).ended or row.seen.since > since]
    if as_json:
        print(json.dumps([row.to_json() for row in rows], indent=2, ensure_ascii=False))
        return 0
    if not rows:
        older = "" if everything else "; --all shows older ones"
        print(f"no run lives or has ended lately{older}")
        return 0
    _print(rows, with_failures=run is not None)
    return 0


def _chosen(run: str | None) -> Iterator[runs.Entry]:
    """The runs to list, the oldest first; those of this machine that are not registered, too."""
    every = runs.known()
    if run is None:
        yield from every
        return
    path = Path(run).absolute()
    state = None if path.is_file() else runs.find(run)
    for entry in every:
        same = state is not None and entry.state.exp_dir == state.exp_dir
        if same or entry.config in (str(path), f"{path}.yaml"):
            yield entry


def _row(entry: runs.Entry) -> Row:
    """A run as it is, asked of its hosts unless it is known to have ended."""
    state = latest(entry.state)
    if entry.ended is not None:
        return Row(state, entry.ended)
    try:
        return Row(state, Outcome.of(runs.query(state)))
    except FlagscaleError as error:
        return Row(state, Outcome(Phase.UNREACHABLE.value, state.started), error.message)


def _print(rows: Sequence[Row], *, with_failures: bool) -> None:
    from flagscale.launcher.show import view

    view.console().print(_table(rows))
    for row in rows:
        if row.trouble:
            print(f"note: {row.state.run_id}: {row.trouble}", file=sys.stderr)
        for number, text in row.seen.failures if with_failures else ():
            print(f"{row.state.run_id} attempt {number}: {text}")


def _table(rows: Sequence[Row]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from flagscale.launcher.show import view

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("run", "name", "state", "step", "age", "hosts", "directory"):
        table.add_column(heading, no_wrap=heading in ("run", "age"), overflow="fold")
    for row in rows:
        state = row.state
        gone = "" if state.exp_dir.exists() else " (gone)"
        table.add_row(
            state.run_id,
            Text(state.name),
            Text(row.seen.phase, view.STYLES[Phase(row.seen.phase)]),
            row.seen.step,
            view.duration(time.time() - state.started) if state.started else "?",
            Text(compress(host.name for host in state.hosts)),
            Text(f"{state.exp_dir}{gone}"),
        )
    return table
