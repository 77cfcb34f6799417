"""Sweeps: many runs of one YAML with different values (``-m``), through any runner.

``run`` starts them, a limited number at a time, waits for all and prints their results. Ctrl-C ends
the runs that were started. Each run's directory follows from its values, so ``query`` and ``stop``
find the runs of a sweep by the same command line.
"""

from __future__ import annotations

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
from flagscale.config.sweeps import EXP_DIR, expand_sweep, load_combinations
from flagscale.errors import ConfigError, FlagscaleError, JobError, Problem
from flagscale.files import strict_json
from flagscale.launcher import actions, runs
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.launcher.run_commands import stop_run
from flagscale.launcher.snapshot import Phase
from flagscale.launcher.state import RunState
from flagscale.launcher.sweep_runs import (
    SweepRun,
    print_sweep,
    print_sweep_table,
    record_sweep,
)
from flagscale.output_streams import lossy_standard_streams

if TYPE_CHECKING:
    from flagscale.launcher.planning.model import LaunchPlan

# Maximum time for a run that failed at its start to end.
_MAX_ENDING_SECONDS = 60.0
_SWEEP_OPTIONS = ("json", "csv")
_POLL_INTERVAL_SECONDS = 0.2
_MAX_CONCURRENT_STOPS = 32
"""Maximum number of runs that are ended concurrently."""


@dataclass(kw_only=True, eq=False)
class PlannedRun(SweepRun):
    """Run of a sweep whose configuration is loaded."""

    experiment: Experiment


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
        name
        for name in OPTIONS
        if name not in _SWEEP_OPTIONS and getattr(options, name) not in (None, False)
    ]
    if single_run_options:
        raise ConfigError(
            [
                Problem(name, f"is of one run; with -m there are {' and '.join(_SWEEP_OPTIONS)}")
                for name in single_run_options
            ]
        )
    rows = [
        PlannedRun(
            values={value.key: value.text for value in combination.values},
            exp_dir=loaded.experiment.exp_dir,
            experiment=loaded.experiment,
        )
        for combination, loaded in zip(sweep_spec.combinations, loaded_configs, strict=True)
    ]
    return _ACTIONS[options.action](rows, options, jobs)


# -- run ------------------------------------------------------------------------------------------


class _SweepLauncher:
    """Launches runs one after the other, at most ``jobs`` alive at a time; a thread waits for each.

    The threads are daemons: the runs they wait for are ended before the program ends.
    """

    def __init__(self, rows: Sequence[PlannedRun], jobs: int) -> None:
        self._rows = rows
        self._started_runs: list[PlannedRun] = []
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

    def _take_next(self) -> PlannedRun | None:
        """Return the next run to start, or None if there is none."""
        with self._lock:
            if self._stopping.is_set() or len(self._started_runs) == len(self._rows):
                return None
            row = self._rows[len(self._started_runs)]
            self._started_runs.append(row)
        self._print_progress(row, f"starts in {row.exp_dir}")
        return row

    def _print_progress(self, row: PlannedRun, text: str) -> None:
        number, count = self._started_runs.index(row) + 1, len(self._rows)
        log_line(f"[{number:{len(str(count))}}/{count}] {row}: {text}")

    def _launch_one(self, row: PlannedRun) -> None:
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


def _run_all(rows: Sequence[PlannedRun], options: Options, jobs: int) -> int:
    if not any(EXP_DIR in row.values for row in rows):
        record_sweep(rows[0].experiment.config_file, rows)
    with lossy_standard_streams():
        try:
            _SweepLauncher(rows, jobs).run()
        finally:
            print_sweep(rows, options)
    return max(row.exit_code for row in rows)


# -- the others -----------------------------------------------------------------------------------


def _query_all(rows: Sequence[PlannedRun], options: Options, _jobs: int) -> int:
    """Print the state of each run; return 3 if some host does not answer."""
    for row in rows:
        row.state = runs.find_in_directory(row.exp_dir)
        if row.state is not None:
            row.record_snapshot(Run(row.state).status())
    print_sweep(rows, options)
    return 3 if any(row.phase == Phase.UNREACHABLE.value for row in rows) else 0


def _stop_all(rows: Sequence[PlannedRun], options: Options, _jobs: int) -> int:
    """End the live runs; return the worst exit code of those that could not be ended."""

    def stop_one(row: PlannedRun) -> int:
        row.state = runs.find_in_directory(row.exp_dir)
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
    print_sweep(rows, options)
    return max(exit_codes)


def _print_plans(rows: Sequence[PlannedRun], options: Options, _jobs: int) -> int:
    """Print the plan of each run: ranks, hosts and directory."""
    from flagscale.launcher.runners.base import runner_for_experiment

    plans = [runner_for_experiment(row.experiment).plan(row.experiment) for row in rows]
    if options.json:
        _print_records([_plan_record(*pair) for pair in zip(rows, plans, strict=True)])
        return 0
    cells = [
        [f"{plan.world_size}", f"{len(plan.hosts)}", str(row.exp_dir)]
        for row, plan in zip(rows, plans, strict=True)
    ]
    print_sweep_table(rows, ("ranks", "hosts", "directory"), cells)
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        print(f"note: {note}")
    return 0


def _plan_record(row: PlannedRun, plan: LaunchPlan) -> dict[str, Any]:
    hosts = [host.name for host in plan.hosts]
    record = row.to_json()
    row_fields = {name: record[name] for name in ("values", "exp_dir")}
    return {
        **row_fields,
        "overrides": list(row.experiment.overrides),
        "hosts": hosts,
        "world_size": plan.world_size,
    }


_ACTIONS: dict[str, Callable[[Sequence[PlannedRun], Options, int], int]] = {
    "run": _run_all,
    "dryrun": _print_plans,
    "query": _query_all,
    "stop": _stop_all,
}
"""Actions that are supported for sweeps."""


def _print_records(records: Sequence[dict[str, Any]]) -> None:
    print(strict_json(records, 2), flush=True)
