"""Registry of the user's runs: one small file per run, independent of the run's directory.

``${XDG_STATE_HOME:-~/.local/state}/flagscale/runs/<run id>.json`` holds the state of a run when it
was started, and the YAML it was started from. It is written atomically before anything starts,
under a unique name, so concurrent launchers do not conflict. The state in the run's own
directory takes precedence.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError, FlagscaleError, RunStateError
from flagscale.files import make_private_directory, read_json, to_plain, write_json
from flagscale.hosts import processes
from flagscale.hosts.names import list_first
from flagscale.launcher.layout import Layout, registry_directory
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.launcher.runners.base import runner_for_run
from flagscale.launcher.snapshot import Phase, Snapshot
from flagscale.launcher.state import (
    HostState,
    RunState,
    UnreadableStateError,
    load_state,
    load_states,
    make_state,
    read_state,
    reload_state,
)
from flagscale.status import RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

_MAX_ENTRIES = 300
_LISTED_RUNS = 3
PARALLEL_QUERIES = 8
"""Number of runs whose hosts are queried at a time."""


@dataclass(frozen=True)
class Outcome:
    """State of a run when it was last queried.

    ``since`` is in Unix seconds, ``step`` is formatted, ``failures`` has the number and the
    headline of each failed attempt.
    """

    phase: str
    since: float
    step: str = ""
    failures: Sequence[tuple[int, str]] = ()

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> Outcome:
        failures = [(number, failure.headline()) for number, failure in snapshot.earlier]
        if snapshot.failure is not None:
            failures.append((snapshot.attempt, snapshot.failure.headline()))
        return cls(snapshot.phase.value, snapshot.since, snapshot.format_steps(), failures)


@dataclass(frozen=True)
class RunEntry:
    """Registered run.

    ``config`` is the YAML that it was started from. ``given`` is the directory as written in the
    YAML, which may mean another one on other machines. ``ended`` is the outcome, if the run is
    known to have ended.
    """

    state: RunState
    config: str = ""
    given: str = ""
    ended: Outcome | None = None

    def save(self) -> None:
        """Write the entry.

        Raises:
            OSError: the file cannot be written.
        """
        path = _entry_path(self.state.run_id)
        make_private_directory(path.parent)
        write_json(path, to_plain(self), durable=False)


def _entry_path(run_id: str) -> Path:
    return registry_directory() / f"{run_id}.json"


def _entry_paths() -> list[Path]:
    """Return the files of all runs, oldest first."""
    with suppress(OSError):
        return sorted(registry_directory().glob("*.json"))
    return []


@contextmanager
def register_run(plan: LaunchPlan, experiment: Experiment) -> Iterator[Callable[[RunState], None]]:
    """Register a run before its scripts are started.

    The block receives a function that updates the registered state. If the run is not started after
    all, its entry is removed.
    """
    entry = RunEntry(
        make_state(plan), str(experiment.config_file), _directory_as_written(experiment)
    )
    _save_entry(entry)
    try:
        yield lambda state: _save_entry(replace(entry, state=state))
    except (ConfigError, RunStateError):
        with suppress(OSError):
            _entry_path(plan.run_id).unlink(missing_ok=True)
        raise


def _directory_as_written(experiment: Experiment) -> str:
    return str(experiment.resolved.get("experiment", {}).get("exp_dir", ""))


def _save_entry(entry: RunEntry) -> None:
    try:
        entry.save()
        _prune_entries()
    except OSError as error:
        # A run that is recorded only in its own directory can still be used.
        text = f"{error.filename}: {error.strerror}"
        print(f"note: run {entry.state.run_id} is not registered: {text}", file=sys.stderr)


def _prune_entries() -> None:
    """Remove the oldest ended runs once there are many."""
    paths = _entry_paths()
    for path in paths[: max(0, len(paths) - _MAX_ENTRIES)]:
        entry = _read_file(path)
        if entry is None or entry.ended or all(host.exit_record() for host in entry.state.hosts):
            path.unlink(missing_ok=True)


def read_entries() -> list[RunEntry]:
    """Return all registered runs that can be read, oldest first."""
    candidates = (_read_file(path) for path in _entry_paths())
    return [entry for entry in candidates if entry is not None]


def read_entry(run_id: str) -> RunEntry | None:
    """Return the entry of a run, or None."""
    return _read_file(_entry_path(run_id))


def _read_file(path: Path) -> RunEntry | None:
    try:
        record = read_json(path)
        if record is None:
            return None
        state = read_state(record["state"], path)
        ended = Outcome(**record["ended"]) if record["ended"] is not None else None
        return RunEntry(**{**record, "state": state, "ended": ended})
    except (OSError, RunStateError, TypeError, KeyError):
        return None


def find_all_runs() -> list[RunEntry]:
    """Return registered runs, and unregistered ones with live processes on this machine."""
    registered = read_entries()
    ids = {entry.state.run_id for entry in registered}
    return [
        *registered,
        *(RunEntry(run) for run in _find_live_processes() if run.run_id not in ids),
    ]


def query_run(state: RunState) -> Snapshot:
    """Query the hosts of a run for its current state.

    Raises:
        FlagscaleError: they cannot be queried.
    """
    with closing(runner_for_run(state)) as runner:
        return remember_outcome(state, runner.query(state))


def remember_outcome(state: RunState, snapshot: Snapshot) -> Snapshot:
    """Register the end of a run, and correct a snapshot of a run whose directory is gone.

    An ended run does not change any more, so its registered outcome replaces a lost one.
    """
    entry = read_entry(state.run_id) if snapshot.phase.ended else None
    if entry is None:
        return snapshot
    if entry.ended is None:
        with suppress(OSError):
            replace(entry, state=state, ended=Outcome.from_snapshot(snapshot)).save()
    elif snapshot.phase is Phase.LOST:
        phase = Phase(entry.ended.phase)
        hosts = tuple(replace(row, phase=phase) for row in snapshot.hosts)
        return replace(snapshot, phase=phase, since=entry.ended.since, hosts=hosts)
    return snapshot


def find_in_directory(exp_dir: Path) -> RunState | None:
    """Return the run that was started last in a directory, even if the directory is gone or its
    state is unreadable.

    Raises:
        RunStateError: the state is unreadable, and the run is not registered.
    """
    try:
        state = load_state(Layout(exp_dir).state)
    except UnreadableStateError as error:
        state = _find_registered(exp_dir)
        if state is None:
            raise
        print(
            f"note: {error.message}; run {state.run_id}, which is registered, is used",
            file=sys.stderr,
        )
        return state
    return _find_registered(exp_dir) if state is None else state


def _find_registered(exp_dir: Path) -> RunState | None:
    """Return the last run of a directory that is registered or has live processes here."""
    real_path = exp_dir.resolve()
    states = [
        entry.state for entry in find_all_runs() if entry.state.exp_dir.resolve() == real_path
    ]
    return states[-1] if states else None


def find_history(exp_dir: Path) -> list[RunState]:
    """Return all runs that were started in a directory and whose files still exist, oldest first.

    Raises:
        RunStateError: the state of the last run is unreadable, and no run is registered.
    """
    last_run = find_in_directory(exp_dir)
    if last_run is None:
        return []
    states = {last_run.run_id: last_run}
    real_path = exp_dir.resolve()
    # Runs of an older version are only registered.
    for entry in read_entries():
        state = entry.state
        if state.exp_dir.resolve() == real_path and any(h.run_dir.exists() for h in state.hosts):
            states[state.run_id] = state
    with suppress(UnreadableStateError):
        states |= {state.run_id: state for state in load_states(Layout(exp_dir))}
    return sorted(states.values(), key=lambda state: (state.started, state.run_id))


def find_elsewhere(experiment: Experiment) -> list[RunState]:
    """Return runs of the same YAML that may live in other directories.

    A relative directory is another one for each working directory of the launcher.
    """
    config, written_directory = str(experiment.config_file), _directory_as_written(experiment)
    if Path(written_directory).is_absolute():
        return []
    return _find_live_runs(
        entry
        for entry in read_entries()
        if (entry.config, entry.given) == (config, written_directory)
        and entry.state.exp_dir != experiment.exp_dir
    )


def _find_live_runs(entries: Iterable[RunEntry]) -> list[RunState]:
    """Return the runs that may live, in order."""
    states = [reload_state(entry.state) for entry in entries if entry.ended is None]
    with ThreadPoolExecutor(PARALLEL_QUERIES) as pool:
        return [
            state for state, lives in zip(states, pool.map(_may_live, states), strict=True) if lives
        ]


def _may_live(state: RunState) -> bool:
    try:
        return not query_run(state).phase.ended
    except FlagscaleError:
        return True


def find_of_experiment(experiment: Experiment) -> RunState | None:
    """Return the run of an experiment: of its directory, otherwise of :func:`find_elsewhere`.

    Raises:
        RunStateError: there are several.
    """
    state = find_in_directory(experiment.exp_dir)
    if state is not None:
        return state
    candidates = find_elsewhere(experiment)
    if len(candidates) > 1:
        lines = "".join(f"\n  {run.run_id} in {run.exp_dir}" for run in candidates)
        raise RunStateError(
            f"no run was started in {experiment.exp_dir}, and {len(candidates)} of this "
            f"configuration may live elsewhere:{lines}",
            hint="name one by its id",
        )
    for candidate in candidates:
        print(f"note: run {candidate.run_id} was started in {candidate.exp_dir}", file=sys.stderr)
        return candidate
    return None


def choose_run(action: str) -> RunState:
    """Return the run of a command that names none: the only one that may live.

    Raises:
        RunStateError: There is none, or there are several.
    """
    entries = read_entries()
    live_runs = _find_live_runs(entries)
    if len(live_runs) == 1 and action != "stop":
        (state,) = live_runs
        print(f"run {state.run_id} ({state.name}) in {state.exp_dir}", file=sys.stderr)
        return state
    listed_runs = live_runs or [entry.state for entry in entries][-_LISTED_RUNS:]
    lines = "".join(f"\n  {run.run_id}  {run.name}  {run.exp_dir}" for run in reversed(listed_runs))
    kind = "alive" if live_runs else "the last ones"
    raise RunStateError(
        f"`flagscale {action}` needs a run" + (f"; {kind}:{lines}" if lines else ""),
        hint=f"`flagscale {action} ID`, a name, a directory or a YAML",
    )


def require_run(text: str) -> RunState:
    """Return the run that a text names, see :func:`find_run`.

    Raises:
        RunStateError: There is none.
    """
    state = find_run(text)
    if state is None:
        ids = list_first([entry.state.run_id for entry in reversed(read_entries())], _LISTED_RUNS)
        raise RunStateError(
            f"{text!r} is not a run id, a prefix of one, a directory in which a run was "
            "started, a run's name, or a YAML",
            hint=f"`flagscale runs` lists yours{f': {ids}' if ids else ''}",
        )
    return state


def find_run(text: str) -> RunState | None:
    """Return the run that a text names, or None.

    The text is a run id, the beginning of exactly one, a run's directory, or a run's name, which
    means the newest run of that name.

    Raises:
        ConfigError: several ids begin with the text, or runs of that name are in several
            directories.
    """
    if is_directory(text):
        return find_in_directory(Path(text).absolute())
    states = [entry.state for entry in find_all_runs()]
    matches = [state for state in states if text and state.run_id.startswith(text)]
    matches = [state for state in matches if state.run_id == text] or matches
    if len(matches) > 1:
        ids = list_first([state.run_id for state in matches], 5)
        raise ConfigError(
            f"{text}: {len(matches)} runs begin so: {ids}", hint="give more characters of the id"
        )
    state = matches[0] if matches else _find_by_name(text, states)
    return reload_state(state) if state is not None else None


def _find_by_name(name: str, states: Sequence[RunState]) -> RunState | None:
    """Return the newest run of a name, whose runs have to be in one directory."""
    newest = {state.exp_dir.resolve(): state for state in states if name and state.name == name}
    if len(newest) > 1:
        lines = "".join(f"\n  {run.run_id} in {run.exp_dir}" for run in newest.values())
        raise ConfigError(
            f"{name}: runs of this name are in {len(newest)} directories:{lines}",
            hint="name one by its id",
        )
    return next(iter(newest.values()), None)


def is_directory(text: str) -> bool:
    """Return True if a text names a run by its directory, which may be gone, and not by its id."""
    return "/" in text or Path(text).is_dir()


def _find_live_processes() -> list[RunState]:
    """Return the runs with live processes on this machine, as far as the environment of these
    processes is readable.
    """
    states: dict[str, RunState] = {}
    for pid in processes.iter_pids():
        environment = processes.read_environment(pid)
        run_id = os.fsdecode(environment.get(RUN_ID_VARIABLE.encode(), b""))
        status = os.fsdecode(environment.get(STATUS_DIR_VARIABLE.encode(), b""))
        if run_id and status and run_id not in states:
            states[run_id] = _state_from_process(run_id, Path(status).parent)
    return list(states.values())


def _state_from_process(run_id: str, run_dir: Path) -> RunState:
    # <exp_dir>/logs/details/<host>/<run id>, or runner.log_dir in place of the first three.
    parents = run_dir.parents
    has_default_layout = len(parents) > 3 and (parents[1].name, parents[2].name) == (
        "details",
        "logs",
    )
    exp_dir = parents[3] if has_default_layout else run_dir
    missing_file = run_dir / "none"
    host = HostState(
        "localhost",
        0,
        0,
        run_dir,
        missing_file,
        node_rank=0,
        script=missing_file,
        pid_file=missing_file,
    )
    runner = RunnerHandle("local")
    return reload_state(
        RunState(
            run_id,
            name=exp_dir.name,
            exp_dir=exp_dir,
            started=0.0,
            world_size=0,
            external=True,
            stop_grace=10.0,
            runner=runner,
            hosts=(host,),
        )
    )
