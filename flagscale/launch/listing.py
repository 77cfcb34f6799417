"""``flagscale runs``: what the user has started, wherever it is, and what became of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flagscale.errors import FlagscaleError
from flagscale.hosts.names import compress
from flagscale.launch import runs
from flagscale.launch.failures import earlier_failures
from flagscale.launch.runners.base import runner_of
from flagscale.launch.snapshot import Phase, Snapshot
from flagscale.launch.state import RunState

if TYPE_CHECKING:
    from rich.table import Table

_ASKED_AT_ONCE = 8
# Runs that have ended are history after this; before, somebody may wonder what became of them.
_RECENT_SECONDS = 2 * 24 * 3600.0


@dataclass(frozen=True)
class Row:
    """A run as it is now; ``failures``: the number of each attempt that failed, and by what."""

    state: RunState
    phase: str
    since: float
    step: str = ""
    failures: tuple[tuple[int, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        state = self.state
        return {
            "run_id": state.run_id,
            "name": state.name,
            "state": self.phase,
            "since": self.since,
            "started": state.started,
            "step": self.step,
            "hosts": [host.name for host in state.hosts],
            "exp_dir": str(state.exp_dir),
            "there": state.exp_dir.exists(),
            "failures": [{"attempt": n, "failure": text} for n, text in self.failures],
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
        now = time.time()
        rows = [row for row in rows if _lives(row) or now - row.since < _RECENT_SECONDS]
    if as_json:
        print(json.dumps([row.to_json() for row in rows], indent=2, ensure_ascii=False))
        return 0
    if not rows:
        print(
            "no run lives or has ended lately" + ("" if everything else "; --all shows older ones")
        )
        return 0
    _print(rows, with_failures=run is not None)
    return 0


def _lives(row: Row) -> bool:
    return row.phase in (Phase.STARTING, Phase.RUNNING, Phase.UNREACHABLE)


def _chosen(run: str | None) -> Iterator[runs.Entry]:
    """The runs to list, the oldest first; those of this machine that are not registered, too."""
    registered = runs.entries()
    known = {entry.state.run_id for entry in registered}
    strays = [runs.Entry(state) for state in runs.living_here() if state.run_id not in known]
    every = [*registered, *strays]
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
    state = runs.latest(entry)
    failures = _failures(state)
    if entry.ended is not None:
        return Row(state, entry.ended["phase"], entry.ended["since"], entry.ended["step"], failures)
    try:
        runner = runner_of(state)
        try:
            seen = runner.query(state)
        finally:
            runner.close()
    except FlagscaleError as error:
        return Row(state, Phase.UNREACHABLE.value, state.started, error.message)
    row = Row(state, seen.phase.value, seen.since, _step(seen), failures or _failures(state))
    if seen.failure is not None:
        row = replace(row, failures=(*row.failures, (seen.attempt, seen.failure.headline())))
    if seen.phase.ended and entry.config:
        # It will not change any more, and its directory may go.
        ended = {"phase": row.phase, "since": row.since, "step": row.step}
        with suppress(OSError):
            replace(entry, state=state, ended=ended).save()
    return row


def _step(seen: Snapshot) -> str:
    if seen.step is None:
        return ""
    return f"{seen.step}/{seen.train_steps}" if seen.train_steps else str(seen.step)


def _failures(state: RunState) -> tuple[tuple[int, str], ...]:
    """What the attempts before the last one failed by."""
    return tuple((number, one.headline()) for number, one in earlier_failures(state.hosts))


def _print(rows: Sequence[Row], *, with_failures: bool) -> None:
    from flagscale.launch.show import view

    shown = view.console()
    shown.print(_table(rows))
    for row in rows if with_failures else ():
        for number, text in row.failures:
            shown.print(f"{row.state.run_id} attempt {number}: {text}", soft_wrap=True)


def _table(rows: Sequence[Row]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from flagscale.launch.show import view

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("run", "name", "state", "step", "age", "hosts", "place"):
        table.add_column(heading, no_wrap=heading in ("run", "age"), overflow="fold")
    for row in rows:
        state = row.state
        gone = "" if state.exp_dir.exists() else " (gone)"
        table.add_row(
            state.run_id,
            Text(state.name),
            Text(row.phase, view.STYLES[Phase(row.phase)]),
            row.step,
            view.duration(time.time() - state.started) if state.started else "?",
            Text(compress(host.name for host in state.hosts)),
            Text(f"{state.exp_dir}{gone}"),
        )
    return table
