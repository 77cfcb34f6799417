"""Many runs of one YAML, each with values of its own: what ``-m`` does, through any runner.

``run`` starts them, so many at a time, waits for all and shows what became of each; Ctrl-C ends
what was started. Since every run has a directory that follows from its values, ``query`` and
``stop`` find the runs of a sweep by the same words.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flagscale.api import Run
from flagscale.config.actions import OPTIONS
from flagscale.config.arguments.values import did_you_mean
from flagscale.config.schema import Experiment, Options
from flagscale.config.sweeps import Combination, Sweep, load_each, sweep
from flagscale.errors import ConfigError, FlagscaleError, JobError, Problem
from flagscale.files import strict_json
from flagscale.launcher import actions, runs
from flagscale.launcher.liveness.agent_log import say
from flagscale.launcher.run_commands import finish
from flagscale.launcher.snapshot import Phase, Snapshot
from flagscale.launcher.state import RunState

if TYPE_CHECKING:
    from flagscale.launcher.planning.model import LaunchPlan

NOT_STARTED = "not started"
_TERMINATED = 143
# How long a run that has failed at its start may take to end.
_ENDING_SECONDS = 60.0
_LOOK_SECONDS = 0.2
_MOST_ENDING = 32
"""Runs that are ended at once."""


@dataclass(eq=False)
class Row:
    """A run of a sweep. ``trouble`` is why it was not started, or how it failed; ``code``: the exit
    code that the command line would have ended with."""

    combination: Combination
    experiment: Experiment
    state: RunState | None = None
    seen: Snapshot | None = None
    trouble: str = ""
    code: int = 0

    @property
    def phase(self) -> str:
        return self.seen.phase.value if self.seen is not None else NOT_STARTED

    def start(self, state: RunState) -> None:
        self.state = state

    def take(self, seen: Snapshot) -> None:
        """What it was doing last."""
        self.seen = seen
        if seen.failure is not None:
            self.trouble = seen.failure.headline()
        if seen.phase is Phase.STOPPED:
            self.code = seen.exit_code or _TERMINATED
        elif seen.phase in (Phase.FAILED, Phase.LOST):
            self.code = seen.exit_code or 1

    def figures(self) -> dict[str, Any]:
        """What it came to, as far as that is known."""
        names = ("step", "loss", "tokens_per_second")
        return {name: getattr(self.seen, name, None) for name in names}

    def to_json(self) -> dict[str, Any]:
        return {
            "values": {value.key: value.text for value in self.combination.values},
            "state": self.phase,
            "run_id": self.state.run_id if self.state is not None else None,
            **self.figures(),
            "exit_code": self.code,
            "trouble": self.trouble,
            "exp_dir": str(self.experiment.exp_dir),
        }


def main(directory: Path, name: str, overrides: Sequence[str], jobs: int) -> int:
    """Do with every run of a sweep what the configuration's ``action`` says; the exit code is the
    worst of them. Raises :class:`ConfigError`, before anything starts, for any of them."""
    found = sweep(overrides)
    loaded = load_each(directory, name, found, None)
    options = loaded[0].options
    if options.action not in _ACTIONS:
        known = f"with -m there are {', '.join(_ACTIONS)}{did_you_mean(options.action, _ACTIONS)}"
        raise ConfigError(Problem("action", f"{options.action} is of one run; {known}"))
    given = [
        name for name in OPTIONS if name != "json" and getattr(options, name) not in (None, False)
    ]
    if given:
        raise ConfigError([Problem(name, "is of one run; with -m there is json") for name in given])
    rows = [Row(one, each.experiment) for one, each in zip(found.combinations, loaded, strict=True)]
    return _ACTIONS[options.action](found, rows, options, jobs)


# -- run ------------------------------------------------------------------------------------------


class _Launches:
    """Runs that are started one after the other, ``jobs`` of them alive at a time, each waited for
    by a thread. The threads end with the program: what they wait for was ended before."""

    def __init__(self, rows: Sequence[Row], jobs: int) -> None:
        self._rows = rows
        self._begun: list[Row] = []
        self._working = min(jobs, len(rows))
        self._stopping = threading.Event()
        self._noted: set[str] = set()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Stay until all have ended. Ctrl-C ends those that live, and no other is started."""
        actions.be_interrupted()
        for _ in range(self._working):
            threading.Thread(target=self._work, daemon=True).start()
        try:
            # A thread whose join was interrupted is taken for ended by some Pythons.
            while self._working:
                time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:
            self._stopping.set()
            say("stopping the runs of this sweep")
            self._stop()
            raise

    def _stop(self) -> None:
        """End what was started, and what is being started as soon as there is a run to end."""
        ending: dict[str, threading.Thread] = {}
        lost: list[str] = []

        def end(state: RunState) -> None:
            try:
                finish(state)
            except FlagscaleError as error:
                lost.append(state.run_id)
                say(f"warning: {error}")

        try:
            while self._working > len(lost):
                for state in [row.state for row in self._begun if row.state is not None]:
                    if state.run_id not in ending:
                        thread = threading.Thread(target=end, args=(state,), daemon=True)
                        ending[state.run_id] = thread
                        thread.start()
                time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:
            living = [run_id for run_id, thread in ending.items() if thread.is_alive()]
            say(f"these may live on: {', '.join(living)}; `flagscale stop RUN` ends one")
            raise

    def _work(self) -> None:
        try:
            while (row := self._next()) is not None:
                self._launch(row)
                self._tell(row, f"{row.phase}{f': {row.trouble}' if row.trouble else ''}")
        finally:
            with self._lock:
                self._working -= 1

    def _next(self) -> Row | None:
        """The next one to start; None where no other is to be."""
        with self._lock:
            if self._stopping.is_set() or len(self._begun) == len(self._rows):
                return None
            row = self._rows[len(self._begun)]
            self._begun.append(row)
        self._tell(row, f"starts in {row.experiment.exp_dir}")
        return row

    def _tell(self, row: Row, what: str) -> None:
        number, count = self._begun.index(row) + 1, len(self._rows)
        say(f"[{number:{len(str(count))}}/{count}] {row.combination}: {what}")

    def _launch(self, row: Row) -> None:
        """One run from its start to its end."""
        try:
            state = actions.launch(row.experiment, started=row.start, note=self._note)
            row.take(Run(state).wait())
        except JobError as error:
            row.trouble, row.code = error.message.partition("\n")[0], error.exit_code
            if row.state is not None:
                row.take(Run(row.state).wait(_ENDING_SECONDS))
            if row.phase == Phase.STOPPED.value:
                row.trouble = ""
        except (FlagscaleError, OSError) as error:
            row.trouble, row.code = str(error), getattr(error, "exit_code", 1)

    def _note(self, text: str) -> None:
        """Say once what is to be said of most of the runs."""
        with self._lock:
            new = text not in self._noted
            self._noted.add(text)
        if new:
            say(f"note: {text}")


def _run(found: Sweep, rows: Sequence[Row], options: Options, jobs: int) -> int:
    try:
        _Launches(rows, jobs).run()
    finally:
        _show(found, rows, options)
    return max(row.code for row in rows)


# -- the others -----------------------------------------------------------------------------------


def _query(found: Sweep, rows: Sequence[Row], options: Options, _jobs: int) -> int:
    """Show what became of each so far; 3 if some host does not answer."""
    for row in rows:
        row.state = runs.of_directory(row.experiment.exp_dir)
        if row.state is not None:
            row.take(Run(row.state).status())
    _show(found, rows, options)
    return 3 if any(row.phase == Phase.UNREACHABLE.value for row in rows) else 0


def _stop(found: Sweep, rows: Sequence[Row], options: Options, _jobs: int) -> int:
    """End those that live; the exit code of the worst that could not be ended."""

    def end(row: Row) -> int:
        row.state = runs.of_directory(row.experiment.exp_dir)
        try:
            if row.state is not None:
                finish(row.state)
                row.take(Run(row.state).status())
        except FlagscaleError as error:
            row.trouble = error.message
            return error.exit_code
        return 0

    with ThreadPoolExecutor(min(_MOST_ENDING, len(rows))) as pool:
        codes = list(pool.map(end, rows))
    _show(found, rows, options)
    return max(codes)


def _dryrun(found: Sweep, rows: Sequence[Row], options: Options, _jobs: int) -> int:
    """Show what would be started, and where."""
    from flagscale.launcher.runners.base import runner_for

    plans = [runner_for(row.experiment).plan(row.experiment) for row in rows]
    if options.json:
        _print_json([_planned(*pair) for pair in zip(rows, plans, strict=True)])
        return 0
    cells = [
        [f"{plan.world_size}", f"{len(plan.hosts)}", str(row.experiment.exp_dir)]
        for row, plan in zip(rows, plans, strict=True)
    ]
    _print(found, rows, ("ranks", "hosts", "directory"), cells)
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        print(f"note: {note}")
    return 0


def _planned(row: Row, plan: LaunchPlan) -> dict[str, Any]:
    hosts = [host.name for host in plan.hosts]
    known = row.to_json()
    own = {name: known[name] for name in ("values", "exp_dir")}
    return {
        **own,
        "overrides": list(row.experiment.overrides),
        "hosts": hosts,
        "world_size": plan.world_size,
    }


_ACTIONS: dict[str, Callable[[Sweep, Sequence[Row], Options, int], int]] = {
    "run": _run,
    "dryrun": _dryrun,
    "query": _query,
    "stop": _stop,
}
"""What can be done with a sweep."""


def _show(found: Sweep, rows: Sequence[Row], options: Options) -> None:
    """Show what became of the runs, in the order of their values."""
    if options.json:
        _print_json([row.to_json() for row in rows])
        return
    headings = ("state", "step", "loss", "tokens/s", "run", "directory")
    _print(found, rows, headings, [_cells(row) for row in rows])
    for row in rows:
        if row.trouble:
            print(f"{row.combination}: {row.trouble}", file=sys.stderr)


def _print_json(records: Sequence[dict[str, Any]]) -> None:
    print(strict_json(records, 2), flush=True)


def _cells(row: Row) -> list[str]:
    step, loss, speed = row.figures().values()
    return [
        row.phase,
        "" if step is None else f"{step}",
        "" if loss is None else f"{loss:.4f}",
        "" if speed is None else f"{speed:,.0f}",
        row.state.run_id if row.state is not None else "",
        str(row.experiment.exp_dir),
    ]


def _print(
    found: Sweep, rows: Sequence[Row], headings: Sequence[str], cells: Sequence[Sequence[str]]
) -> None:
    """A table of the runs: the values of each, and what there is to say of it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from flagscale.launcher.show import view

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in (*found.keys, *headings):
        table.add_column(heading, no_wrap=heading == "run", overflow="fold")
    for row, own in zip(rows, cells, strict=True):
        style = view.STYLES[row.seen.phase] if row.seen is not None else ""
        state = (Text(text, style if text == row.phase else "") for text in own)
        table.add_row(*(Text(value.text) for value in row.combination.values), *state)
    view.console().print(table)
