"""Sweeps: many runs of one YAML with different values (``-m``), through any runner.

``run`` starts them, a limited number at a time, waits for all and prints their results. Ctrl-C ends
the runs that were started. Each run's directory follows from its values, so ``query`` and ``stop``
find the runs of a sweep by the same command line.
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
from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.config.schema import Experiment, Options
from flagscale.config.sweeps import Combination, Sweep, expand_sweep, load_combinations
from flagscale.errors import ConfigError, FlagscaleError, JobError, Problem
from flagscale.files import strict_json
from flagscale.launcher import actions, runs
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.launcher.run_commands import stop_run
from flagscale.launcher.snapshot import Phase, Snapshot
from flagscale.launcher.state import RunState
from flagscale.output_streams import lossy_standard_streams

if TYPE_CHECKING:
    from flagscale.launcher.planning.model import LaunchPlan

PHASE_NOT_STARTED = "not started"
_SIGTERM_EXIT_CODE = 143
# Maximum time for a run that failed at its start to end.
_MAX_ENDING_SECONDS = 60.0
_POLL_INTERVAL_SECONDS = 0.2
_MAX_CONCURRENT_STOPS = 32
"""Maximum number of runs that are ended concurrently."""


@dataclass(eq=False)
class SweepRun:
    """Run of a sweep.

    ``failure_reason`` is the reason why it was not started or failed. ``exit_code`` is the exit
    code that the command would have had for this run alone.
    """

    combination: Combination
    experiment: Experiment
    state: RunState | None = None
    snapshot: Snapshot | None = None
    failure_reason: str = ""
    exit_code: int = 0

    @property
    def phase(self) -> str:
        return self.snapshot.phase.value if self.snapshot is not None else PHASE_NOT_STARTED

    def record_start(self, state: RunState) -> None:
        self.state = state

    def record_snapshot(self, snapshot: Snapshot) -> None:
        """Record the last snapshot."""
        self.snapshot = snapshot
        if snapshot.failure is not None:
            self.failure_reason = snapshot.failure.headline()
        if snapshot.phase is Phase.STOPPED:
            self.exit_code = snapshot.exit_code or _SIGTERM_EXIT_CODE
        elif snapshot.phase in (Phase.FAILED, Phase.LOST):
            self.exit_code = snapshot.exit_code or 1

    def get_metrics(self) -> dict[str, Any]:
        """Return the last known metrics."""
        names = ("step", "loss", "tokens_per_second")
        return {name: getattr(self.snapshot, name, None) for name in names}

    def to_json(self) -> dict[str, Any]:
        return {
            "values": {value.key: value.text for value in self.combination.values},
            "state": self.phase,
            "run_id": self.state.run_id if self.state is not None else None,
            **self.get_metrics(),
            "exit_code": self.exit_code,
            "trouble": self.failure_reason,
            "exp_dir": str(self.experiment.exp_dir),
        }


def run_sweep(directory: Path, name: str, overrides: Sequence[str], jobs: int) -> int:
    """Do the configuration's ``action`` with every run of a sweep; return the worst exit code.

    ``jobs`` is the maximum number of runs that are alive at a time.

    Raises:
        ConfigError: any run's configuration is wrong; nothing has started then.
    """
    sweep_spec = expand_sweep(overrides)
    loaded_configs = load_combinations(directory, name, sweep_spec, None)
    options = loaded_configs[0].options
    if options.action not in _ACTIONS:
        supported = (
            f"with -m there are {', '.join(_ACTIONS)}{did_you_mean(options.action, _ACTIONS)}"
        )
        raise ConfigError(Problem("action", f"{options.action} is of one run; {supported}"))
    single_run_options = [
        name for name in OPTIONS if name != "json" and getattr(options, name) not in (None, False)
    ]
    if single_run_options:
        raise ConfigError(
            [Problem(name, "is of one run; with -m there is json") for name in single_run_options]
        )
    rows = [
        SweepRun(combination, loaded.experiment)
        for combination, loaded in zip(sweep_spec.combinations, loaded_configs, strict=True)
    ]
    return _ACTIONS[options.action](sweep_spec, rows, options, jobs)


# -- run ------------------------------------------------------------------------------------------


class _SweepLauncher:
    """Launches runs one after the other, at most ``jobs`` alive at a time; a thread waits for each.

    The threads are daemons: the runs they wait for are ended before the program ends.
    """

    def __init__(self, rows: Sequence[SweepRun], jobs: int) -> None:
        self._rows = rows
        self._started_runs: list[SweepRun] = []
        self._active_threads = min(jobs, len(rows))
        self._stopping = threading.Event()
        self._printed_notes: set[str] = set()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Wait until all runs have ended. Ctrl-C ends the live ones and starts no others."""
        actions.interrupt_on_signals()
        for _ in range(self._active_threads):
            threading.Thread(target=self._launch_until_done, daemon=True).start()
        try:
            # Some Pythons consider a thread ended if its join was interrupted, so poll a counter.
            while self._active_threads:
                time.sleep(_POLL_INTERVAL_SECONDS)
        except KeyboardInterrupt:
            self._stopping.set()
            log_line("stopping the runs of this sweep")
            self._stop_started()
            raise

    def _stop_started(self) -> None:
        """End the started runs, and those being started as soon as they have a state."""
        stop_threads: dict[str, threading.Thread] = {}
        failed_stops: list[str] = []

        def stop_one(state: RunState) -> None:
            try:
                stop_run(state)
            except FlagscaleError as error:
                failed_stops.append(state.run_id)
                log_line(f"warning: {error}")

        try:
            while self._active_threads > len(failed_stops):
                for state in [row.state for row in self._started_runs if row.state is not None]:
                    if state.run_id not in stop_threads:
                        thread = threading.Thread(target=stop_one, args=(state,), daemon=True)
                        stop_threads[state.run_id] = thread
                        thread.start()
                time.sleep(_POLL_INTERVAL_SECONDS)
        except KeyboardInterrupt:
            live_runs = [run_id for run_id, thread in stop_threads.items() if thread.is_alive()]
            log_line(f"these may live on: {', '.join(live_runs)}; `flagscale stop RUN` ends one")
            raise

    def _launch_until_done(self) -> None:
        try:
            while (row := self._take_next()) is not None:
                self._launch_one(row)
                self._print_progress(
                    row, f"{row.phase}{f': {row.failure_reason}' if row.failure_reason else ''}"
                )
        finally:
            with self._lock:
                self._active_threads -= 1

    def _take_next(self) -> SweepRun | None:
        """Return the next run to start, or None if there is none."""
        with self._lock:
            if self._stopping.is_set() or len(self._started_runs) == len(self._rows):
                return None
            row = self._rows[len(self._started_runs)]
            self._started_runs.append(row)
        self._print_progress(row, f"starts in {row.experiment.exp_dir}")
        return row

    def _print_progress(self, row: SweepRun, text: str) -> None:
        number, count = self._started_runs.index(row) + 1, len(self._rows)
        log_line(f"[{number:{len(str(count))}}/{count}] {row.combination}: {text}")

    def _launch_one(self, row: SweepRun) -> None:
        """Launch one run and wait for its end."""
        try:
            state = actions.launch_in_background(
                row.experiment, started=row.record_start, note=self._print_note_once
            )
            row.record_snapshot(Run(state).wait())
        except JobError as error:
            row.failure_reason, row.exit_code = error.message.partition("\n")[0], error.exit_code
            if row.state is not None:
                row.record_snapshot(Run(row.state).wait(_MAX_ENDING_SECONDS))
            if row.phase == Phase.STOPPED.value:
                row.failure_reason = ""
        except (FlagscaleError, OSError) as error:
            row.failure_reason, row.exit_code = str(error), getattr(error, "exit_code", 1)

    def _print_note_once(self, text: str) -> None:
        """Print each distinct note once, because most runs have the same."""
        with self._lock:
            is_new = text not in self._printed_notes
            self._printed_notes.add(text)
        if is_new:
            log_line(f"note: {text}")


def _run_all(sweep_spec: Sweep, rows: Sequence[SweepRun], options: Options, jobs: int) -> int:
    with lossy_standard_streams():
        try:
            _SweepLauncher(rows, jobs).run()
        finally:
            _print_results(sweep_spec, rows, options)
    return max(row.exit_code for row in rows)


# -- the others -----------------------------------------------------------------------------------


def _query_all(sweep_spec: Sweep, rows: Sequence[SweepRun], options: Options, _jobs: int) -> int:
    """Print the state of each run; return 3 if some host does not answer."""
    for row in rows:
        row.state = runs.find_in_directory(row.experiment.exp_dir)
        if row.state is not None:
            row.record_snapshot(Run(row.state).status())
    _print_results(sweep_spec, rows, options)
    return 3 if any(row.phase == Phase.UNREACHABLE.value for row in rows) else 0


def _stop_all(sweep_spec: Sweep, rows: Sequence[SweepRun], options: Options, _jobs: int) -> int:
    """End the live runs; return the worst exit code of those that could not be ended."""

    def stop_one(row: SweepRun) -> int:
        row.state = runs.find_in_directory(row.experiment.exp_dir)
        try:
            if row.state is not None:
                stop_run(row.state)
                row.record_snapshot(Run(row.state).status())
        except FlagscaleError as error:
            row.failure_reason = error.message
            return error.exit_code
        return 0

    with ThreadPoolExecutor(min(_MAX_CONCURRENT_STOPS, len(rows))) as pool:
        exit_codes = list(pool.map(stop_one, rows))
    _print_results(sweep_spec, rows, options)
    return max(exit_codes)


def _print_plans(sweep_spec: Sweep, rows: Sequence[SweepRun], options: Options, _jobs: int) -> int:
    """Print the plan of each run: ranks, hosts and directory."""
    from flagscale.launcher.runners.base import runner_for_experiment

    plans = [runner_for_experiment(row.experiment).plan(row.experiment) for row in rows]
    if options.json:
        _print_json([_plan_record(*pair) for pair in zip(rows, plans, strict=True)])
        return 0
    cells = [
        [f"{plan.world_size}", f"{len(plan.hosts)}", str(row.experiment.exp_dir)]
        for row, plan in zip(rows, plans, strict=True)
    ]
    _print_table(sweep_spec, rows, ("ranks", "hosts", "directory"), cells)
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        print(f"note: {note}")
    return 0


def _plan_record(row: SweepRun, plan: LaunchPlan) -> dict[str, Any]:
    hosts = [host.name for host in plan.hosts]
    record = row.to_json()
    row_fields = {name: record[name] for name in ("values", "exp_dir")}
    return {
        **row_fields,
        "overrides": list(row.experiment.overrides),
        "hosts": hosts,
        "world_size": plan.world_size,
    }


_ACTIONS: dict[str, Callable[[Sweep, Sequence[SweepRun], Options, int], int]] = {
    "run": _run_all,
    "dryrun": _print_plans,
    "query": _query_all,
    "stop": _stop_all,
}
"""Actions that are supported for sweeps."""


def _print_results(sweep_spec: Sweep, rows: Sequence[SweepRun], options: Options) -> None:
    """Print the results of the runs, in the order of their values."""
    if options.json:
        _print_json([row.to_json() for row in rows])
        return
    headings = ("state", "step", "loss", "tokens/s", "run", "directory")
    _print_table(sweep_spec, rows, headings, [_result_cells(row) for row in rows])
    for row in rows:
        if row.failure_reason:
            print(f"{row.combination}: {row.failure_reason}", file=sys.stderr)


def _print_json(records: Sequence[dict[str, Any]]) -> None:
    print(strict_json(records, 2), flush=True)


def _result_cells(row: SweepRun) -> list[str]:
    step, loss, tokens_per_second = row.get_metrics().values()
    return [
        row.phase,
        "" if step is None else f"{step}",
        "" if loss is None else f"{loss:.4f}",
        "" if tokens_per_second is None else f"{tokens_per_second:,.0f}",
        row.state.run_id if row.state is not None else "",
        str(row.experiment.exp_dir),
    ]


def _print_table(
    sweep_spec: Sweep,
    rows: Sequence[SweepRun],
    headings: Sequence[str],
    cells: Sequence[Sequence[str]],
) -> None:
    """Print a table of the runs: the values of each, and the given cells."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from flagscale.launcher.show import view

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in (*sweep_spec.keys, *headings):
        table.add_column(heading, no_wrap=heading == "run", overflow="fold")
    for row, texts in zip(rows, cells, strict=True):
        style = view.STYLES[row.snapshot.phase] if row.snapshot is not None else ""
        state = (Text(text, style if text == row.phase else "") for text in texts)
        table.add_row(*(Text(value.text) for value in row.combination.values), *state)
    view.make_console().print(table)
