"""The user's runs: a small file each, whatever becomes of the directory that a run writes to.

``${XDG_STATE_HOME:-~/.local/state}/flagscale/runs/<run id>.json`` holds the state of a run as it
was started, and of what it was started. It is written before anything starts, whole or not at
all, and under a name that no other run has, so that two launchers get on beside each other. What a
run's own directory says goes before it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError, FlagscaleError, RunStateError
from flagscale.files import make_private_directory, plain, read_json, write_json
from flagscale.hosts import processes
from flagscale.hosts.names import some
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.launcher.runners.base import runner_of
from flagscale.launcher.snapshot import Phase, Snapshot
from flagscale.launcher.state import HostState, RunState, latest, load_state, read_state, state_of
from flagscale.status import RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

_MOST_KEPT = 300


@dataclass(frozen=True)
class Outcome:
    """What a run was last seen to do: ``since`` in Unix seconds, ``step`` as it is shown, and
    ``failures``: the number of each attempt that failed, and by what."""

    phase: str
    since: float
    step: str = ""
    failures: Sequence[tuple[int, str]] = ()

    @classmethod
    def of(cls, seen: Snapshot) -> Outcome:
        failures = [(number, failure.headline()) for number, failure in seen.earlier]
        if seen.failure is not None:
            failures.append((seen.attempt, seen.failure.headline()))
        return cls(seen.phase.value, seen.since, seen.steps(), failures)


@dataclass(frozen=True)
class Entry:
    """A run that is registered. ``given`` is its directory as the YAML has it, which may mean
    another one elsewhere; ``ended``: what is known of its end, if anything."""

    state: RunState
    config: str = ""
    given: str = ""
    ended: Outcome | None = None

    def save(self) -> None:
        """Raises :class:`OSError` where that is not possible."""
        path = _path(self.state.run_id)
        make_private_directory(path.parent)
        write_json(path, plain(self), durable=False)


def _directory() -> Path:
    given = os.environ.get("XDG_STATE_HOME", "")
    # A user without a home has none of these files: nobody writes to "/~".
    home = os.path.expanduser("~/.local/state")  # noqa: PTH111
    return Path("/", given if given.startswith("/") else home, "flagscale", "runs")


def _path(run_id: str) -> Path:
    return _directory() / f"{run_id}.json"


def _paths() -> list[Path]:
    """The files of all runs, the oldest first."""
    with suppress(OSError):
        return sorted(_directory().glob("*.json"))
    return []


@contextmanager
def registered(plan: LaunchPlan, experiment: Experiment) -> Iterator[Callable[[RunState], None]]:
    """Register a run before its scripts are started; what the block gets registers its state once
    they are. A run that is not started after all is forgotten."""
    entry = Entry(state_of(plan), str(experiment.config_file), _given(experiment))
    _keep(entry)
    try:
        yield lambda state: _keep(replace(entry, state=state))
    except (ConfigError, RunStateError):
        with suppress(OSError):
            _path(plan.run_id).unlink(missing_ok=True)
        raise


def _given(experiment: Experiment) -> str:
    return str(experiment.resolved.get("experiment", {}).get("exp_dir", ""))


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
    paths = _paths()
    for path in paths[: max(0, len(paths) - _MOST_KEPT)]:
        found = _read(path)
        if found is None or found.ended or all(host.exit_record() for host in found.state.hosts):
            path.unlink(missing_ok=True)


def entries() -> list[Entry]:
    """Every run that is registered, the oldest first. What cannot be read is left out."""
    found = (_read(path) for path in _paths())
    return [entry for entry in found if entry is not None]


def registered_as(run_id: str) -> Entry | None:
    """What is registered of a run, if anything."""
    return _read(_path(run_id))


def _read(path: Path) -> Entry | None:
    try:
        record = read_json(path)
        if record is None:
            return None
        state = read_state(record["state"], path)
        ended = Outcome(**record["ended"]) if record["ended"] is not None else None
        return Entry(**{**record, "state": state, "ended": ended})
    except (OSError, RunStateError, TypeError, KeyError):
        return None


def known() -> list[Entry]:
    """Every registered run, and those that nothing but their processes on this machine tell of."""
    registered = entries()
    ids = {entry.state.run_id for entry in registered}
    return [*registered, *(Entry(run) for run in _living_here() if run.run_id not in ids)]


def query(state: RunState) -> Snapshot:
    """What a run is doing now, as its hosts tell. Raises :class:`FlagscaleError` where they cannot
    be asked."""
    with closing(runner_of(state)) as runner:
        return remember(state, runner.query(state))


def remember(state: RunState, seen: Snapshot) -> Snapshot:
    """Register the end of a run, which will not change any more though its directory may go; and
    what is to be told of a run that was seen so, of which no more than that may be known."""
    entry = registered_as(state.run_id) if seen.phase.ended else None
    if entry is None:
        return seen
    if entry.ended is None:
        with suppress(OSError):
            replace(entry, state=state, ended=Outcome.of(seen)).save()
    elif seen.phase is Phase.LOST:
        phase = Phase(entry.ended.phase)
        hosts = tuple(replace(row, phase=phase) for row in seen.hosts)
        return replace(seen, phase=phase, since=entry.ended.since, hosts=hosts)
    return seen


def of_directory(exp_dir: Path) -> RunState | None:
    """The run that was last started in a directory, though that may be gone."""
    state = load_state(Layout(exp_dir).state)
    if state is None:
        real = exp_dir.resolve()
        found = [entry.state for entry in known() if entry.state.exp_dir.resolve() == real]
        state = found[-1] if found else None
    return state


def elsewhere(experiment: Experiment) -> list[RunState]:
    """The runs of the same YAML that may live in other directories: what is given relatively is
    another one wherever the launcher is called."""
    config, given = str(experiment.config_file), _given(experiment)
    if Path(given).is_absolute():
        return []
    return [
        latest(entry.state)
        for entry in entries()
        if (entry.config, entry.given, entry.ended) == (config, given, None)
        and entry.state.exp_dir != experiment.exp_dir
        and _may_live(latest(entry.state))
    ]


def _may_live(state: RunState) -> bool:
    try:
        return not query(state).phase.ended
    except FlagscaleError:
        return True


def of(experiment: Experiment) -> RunState | None:
    """The run of an experiment: of its directory, else the one of :func:`elsewhere`. Raises
    :class:`RunStateError` where there are several."""
    state = of_directory(experiment.exp_dir)
    if state is not None:
        return state
    others = elsewhere(experiment)
    if len(others) > 1:
        lines = "".join(f"\n  {one.run_id} in {one.exp_dir}" for one in others)
        raise RunStateError(
            f"no run was started in {experiment.exp_dir}, and {len(others)} of this configuration "
            f"may live elsewhere:{lines}",
            hint="name one by its id",
        )
    for one in others:
        print(f"note: run {one.run_id} was started in {one.exp_dir}", file=sys.stderr)
        return one
    return None


def named(text: str) -> RunState:
    """The run that a text names, as :func:`find`. Raises :class:`RunStateError` for none."""
    state = find(text)
    if state is None:
        ids = some([entry.state.run_id for entry in reversed(entries())], 3)
        raise RunStateError(
            f"{text!r} is no run's id, no beginning of one, no directory in which a run was "
            "started, and no YAML",
            hint=f"`flagscale runs` lists yours{f': {ids}' if ids else ''}",
        )
    return state


def find(text: str) -> RunState | None:
    """The run that a text names: a run's id, the beginning of just one, or a run's directory; None
    where it names none. Raises :class:`ConfigError` for the beginning of several."""
    if "/" in text or Path(text).is_dir():
        return of_directory(Path(text).absolute())
    found = [entry.state for entry in known() if text and entry.state.run_id.startswith(text)]
    found = [state for state in found if state.run_id == text] or found
    if len(found) > 1:
        ids = some([state.run_id for state in found], 5)
        raise ConfigError(f"{text}: {len(found)} runs begin so: {ids}", hint="give more of it")
    return latest(found[0]) if found else None


def _living_here() -> list[RunState]:
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
    # <exp_dir>/logs/details/<host>/<run id>, or runner.log_dir in place of the first three.
    above = run_dir.parents
    usual = len(above) > 3 and (above[1].name, above[2].name) == ("details", "logs")
    exp_dir = above[3] if usual else run_dir
    none = run_dir / "none"
    host = HostState("localhost", 0, 0, run_dir, none, node_rank=0, script=none, pid_file=none)
    runner = RunnerHandle("local")
    return latest(RunState(run_id, exp_dir.name, exp_dir, 0.0, 0, True, 10.0, runner, (host,)))
