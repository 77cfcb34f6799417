"""The user's runs: a small file each, whatever becomes of the directory that a run writes to.

``${XDG_STATE_HOME:-~/.local/state}/flagscale/runs/<run id>.json`` holds the state of a run as it
was started, and of what it was started. It is written before anything starts, whole or not at
all, and under a name that no other run has, so that two launchers get on beside each other. What a
run's own directory says goes before it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flagscale.config.schema import Experiment, Options
from flagscale.errors import ConfigError, RunStateError
from flagscale.files import make_private_directory, plain, read_json, write_json
from flagscale.hosts import processes
from flagscale.hosts.names import some
from flagscale.launch.layout import Layout
from flagscale.launch.planning.model import LaunchPlan, RunnerHandle
from flagscale.launch.state import HostState, RunState, load_state, read_state, state_of
from flagscale.status import RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

_MOST_KEPT = 300


@dataclass(frozen=True)
class Entry:
    """A run that is registered. ``given`` is its directory as the YAML has it, which may mean
    another one elsewhere; ``ended``: how it was last seen to have ended, where that is known."""

    state: RunState
    config: str = ""
    given: str = ""
    ended: dict[str, Any] | None = None

    def save(self) -> None:
        """Raises :class:`OSError` where that is not possible."""
        directory = _directory()
        make_private_directory(directory)
        write_json(directory / f"{self.state.run_id}.json", plain(self), durable=False)


def _directory() -> Path:
    given = os.environ.get("XDG_STATE_HOME", "")
    base = Path(given) if given.startswith("/") else Path.home() / ".local" / "state"
    return base / "flagscale" / "runs"


@contextmanager
def registered(plan: LaunchPlan, experiment: Experiment) -> Iterator[Callable[[RunState], None]]:
    """Register a run before its scripts are started; what the block gets registers its state once
    they are. A run that is not started after all is forgotten."""
    given = str(experiment.resolved.get("experiment", {}).get("exp_dir", ""))
    entry = Entry(state_of(plan), str(experiment.config_file), given)
    _keep(entry)
    try:
        yield lambda state: _keep(replace(entry, state=state))
    except (ConfigError, RunStateError):
        with suppress(OSError):
            (_directory() / f"{plan.run_id}.json").unlink(missing_ok=True)
        raise


def _keep(entry: Entry) -> None:
    try:
        entry.save()
        _prune()
    except OSError as error:
        # A run that only its directory knows is still a run.
        text = f"{error.filename}: {error.strerror}"
        print(f"note: run {entry.state.run_id} is not registered: {text}", file=sys.stderr)


def _prune() -> None:
    """Forget the oldest runs that have ended, once there are many."""
    paths = sorted(_directory().glob("*.json"))
    for path in paths[: max(0, len(paths) - _MOST_KEPT)]:
        found = _read(path)
        if found is None or found.ended is not None:
            path.unlink(missing_ok=True)


def entries() -> list[Entry]:
    """Every registered run, the oldest first. What cannot be read is left out."""
    found = (_read(path) for path in sorted(_directory().glob("*.json")))
    return [entry for entry in found if entry is not None]


def _read(path: Path) -> Entry | None:
    try:
        record = read_json(path)
        if record is None:
            return None
        return Entry(**{**record, "state": read_state(record["state"], path)})
    except (OSError, RunStateError, TypeError, KeyError):
        return None


def latest(entry: Entry) -> RunState:
    """The state of a registered run, as its own directory tells it where that is still there."""
    return _told(entry.state)


def _told(known: RunState) -> RunState:
    """What a run's own directory says of it, else what is known."""
    with suppress(RunStateError, OSError):
        state = load_state(Layout(known.exp_dir).state)
        if state is not None and state.run_id == known.run_id:
            return state
    return known


def of_directory(exp_dir: Path) -> RunState | None:
    """The run that was last started in a directory, though that may be gone."""
    state = load_state(Layout(exp_dir).state)
    if state is not None:
        return state
    found = [entry.state for entry in entries() if entry.state.exp_dir == exp_dir]
    return found[-1] if found else _unregistered(lambda run: run.exp_dir == exp_dir)


def of(experiment: Experiment) -> RunState | None:
    """The run of an experiment: of its directory, else one of the same YAML whose directory, given
    relatively, was another one where it was started."""
    state = of_directory(experiment.exp_dir)
    if state is not None:
        return state
    given = str(experiment.resolved.get("experiment", {}).get("exp_dir", ""))
    config = str(experiment.config_file)
    found = [
        entry.state
        for entry in entries()
        if entry.ended is None and (entry.config, entry.given) == (config, given)
    ]
    if not found or Path(given).is_absolute():
        return None
    print(f"note: run {found[-1].run_id} was started in {found[-1].exp_dir}", file=sys.stderr)
    return found[-1]


def require(experiment: Experiment) -> RunState:
    """As :func:`of`; raises :class:`RunStateError` where there is none."""
    state = of(experiment)
    if state is None:
        raise RunStateError(
            f"no run was started in {experiment.exp_dir}",
            hint="start one with action=run; `flagscale runs` lists yours",
        )
    return state


def act(text: str, options: Options) -> int:
    """Do the action of ``options`` with the run that a text names, see :func:`find`; its exit
    code."""
    from flagscale.launch import attending

    state = find(text)
    if state is None:
        ids = some([entry.state.run_id for entry in reversed(entries())], 3)
        raise RunStateError(
            f"{text!r} is no run's id, no beginning of one, no directory in which a run was "
            "started, and no YAML",
            hint=f"`flagscale runs` lists yours{f': {ids}' if ids else ''}",
        )
    actions = {"query": attending.query, "logs": attending.show_logs, "stop": attending.stop}
    return actions[options.action](state, options)


def find(text: str) -> RunState | None:
    """The run that a text names: a run's id, the beginning of just one, or a run's directory; None
    where it names none. Raises :class:`ConfigError` for the beginning of several."""
    if "/" in text or Path(text).is_dir():
        return of_directory(Path(text).absolute())
    matching = [entry for entry in entries() if entry.state.run_id.startswith(text)]
    exact = [entry for entry in matching if entry.state.run_id == text] or matching
    if len(exact) > 1:
        ids = some([entry.state.run_id for entry in exact], 5)
        raise ConfigError(f"{text}: {len(exact)} runs begin so: {ids}", hint="give more of it")
    if exact:
        return latest(exact[0])
    return _unregistered(lambda run: run.run_id.startswith(text)) if text else None


def _unregistered(wanted: Callable[[RunState], bool]) -> RunState | None:
    """A living run on this machine that nothing but its processes tells of."""
    return next((run for run in living_here() if wanted(run)), None)


def living_here() -> list[RunState]:
    """The runs of which processes live on this machine, as far as those tell."""
    found: dict[str, RunState] = {}
    for pid in processes.pids():
        environment = processes.environment(pid)
        run_id = os.fsdecode(environment.get(RUN_ID_VARIABLE.encode(), b""))
        status = os.fsdecode(environment.get(STATUS_DIR_VARIABLE.encode(), b""))
        if run_id and status and run_id not in found:
            found[run_id] = _state_here(run_id, Path(status).parent)
    return list(found.values())


def _state_here(run_id: str, run_dir: Path) -> RunState:
    # <exp_dir>/logs/details/<host>/<run id>
    exp_dir = run_dir.parents[3] if len(run_dir.parents) > 3 else run_dir
    nothing = run_dir / "none"
    host = HostState(0, "localhost", 0, 0, run_dir, nothing, nothing, nothing)
    # Whoever started it: what lives here can be ended here, where nothing tells of more.
    return _told(RunState(run_id, "?", exp_dir, 0.0, 0, True, 10.0, RunnerHandle("local"), (host,)))
