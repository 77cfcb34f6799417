"""State of a run on disk (``logs/state.json``): everything that ``query``, ``logs`` and ``stop``
read.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from flagscale.config.command_hints import action_command
from flagscale.errors import ConfigError, Problem, RunStateError
from flagscale.files import (
    format_json,
    make_private_directory,
    read_json,
    require_fixed_names,
    require_private,
    require_trusted_file,
    to_plain,
    write_atomic,
    write_json,
)
from flagscale.hosts.names import compress_names, list_first
from flagscale.launcher.layout import EXIT_FILE, OLD_OUTPUT_FILE, HostFiles, Layout
from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.records import from_record


@dataclass(frozen=True, kw_only=True)
class HostState(HostFiles):
    """Part of a started run on one host."""

    node_rank: int
    script: Path
    pid_file: Path
    pid: int | None = None
    start_ticks: int | None = None
    boot_id: str | None = None
    """Boot id of the host, after it has started the script."""

    def exit_record(self) -> dict[str, Any]:
        """Return the record that agent or script wrote when this host's part ended, or {}."""
        return read_json(self.run_dir / EXIT_FILE) or {}

    def exit(self) -> Exit | None:
        """Return how this host's job ended, or None if it has not ended or left no record."""
        record = self.exit_record()
        if not record:
            return None
        return Exit(
            code=int(record["code"]),
            phase=str(record.get("phase", "job")),
            signal=record.get("signal"),
            ended=float(record["ended"]),
            out_of_memory_kills=record.get("out_of_memory_kills"),
            failed=record.get("failure") is not None,
            lost_peer=self._has_lost_peer(record),
            how=str(record.get("how", "")),
        )

    def _has_lost_peer(self, record: Mapping[str, Any]) -> bool:
        failure = from_record(Failure, record.get("failure"))
        return failure is not None and failure.is_lost_host and failure.host != self.name

    def set_output_aside(self) -> None:
        """Move the output to the run's directory, because a later run prints to the same file."""
        if self.output.exists():
            make_private_directory(self.run_dir)
            self.output.replace(self.run_dir / OLD_OUTPUT_FILE)


@dataclass(frozen=True)
class Exit:
    """End of a host's job.

    ``phase`` is ``job``, ``before_start`` (the job never began) or ``agent`` (the agent itself was
    killed). ``signal`` is the signal that asked the agent to stop.
    """

    code: int
    phase: str
    signal: int | None
    ended: float
    out_of_memory_kills: int | None = None
    failed: bool = False
    """True if the agents named a first failure; a later stop does not change that."""
    lost_peer: bool = False
    """True if the first failure, according to this host, is that it lost the contact to another."""
    how: str = ""
    """Description of an abnormal end of ``before_start``; empty for others."""


@dataclass(frozen=True)
class RunState:
    """State of a started run."""

    run_id: str
    name: str
    exp_dir: Path
    started: float
    world_size: int
    external: bool
    stop_grace: float
    runner: RunnerHandle
    hosts: tuple[HostState, ...] = ()
    stop_requested: float | None = None
    shared_fs: bool = True

    @property
    def job(self) -> str:
        """Id of the scheduler's job; empty if the runner has none, or has not submitted it yet."""
        return str(self.runner.handle.get("job", ""))

    def save(self, path: Path) -> None:
        write_json(path, to_plain(self))


_PATHS = ("run_dir", "script", "output", "pid_file")


class UnreadableStateError(RunStateError):
    """A state file is damaged, or was written by another version."""


def load_state(path: Path) -> RunState | None:
    """Return the run that was started last, or None.

    Raises:
        UnreadableStateError: the file exists but is not a state of this version.
        RunStateError: another user could have written it.
    """
    return _load_state(path, path.parent.parent)


def load_states(layout: Layout) -> list[RunState]:
    """Return the runs that were started in a directory and can be read, oldest first.

    Raises:
        UnreadableStateError: the state of the last run is damaged, see :func:`load_state`.
        RunStateError: another user could have written a state.
    """
    paths = sorted(layout.runs.glob("*/state.json"))
    states = {}
    for path in (*paths, layout.state):
        with suppress(*((UnreadableStateError,) if path != layout.state else ())):
            if (state := _load_state(path, layout.exp_dir)) is not None:
                states[state.run_id] = state
    return sorted(states.values(), key=lambda state: (state.started, state.run_id))


def _load_state(path: Path, exp_dir: Path) -> RunState | None:
    if os.path.lexists(path):
        _check_trust(require_trusted_file, path, exp_dir)
    record = read_json(path)
    if record is None:
        if path.exists():
            raise UnreadableStateError(
                f"{path} is damaged", hint="remove it once the run has ended"
            )
        return None
    return _with_outputs_set_aside(read_state(_with_moved_paths(record, path, exp_dir), path))


def _with_outputs_set_aside(state: RunState) -> RunState:
    """Return the state with the outputs where they are after a later run has started.

    Hosts without a shared file system look for them as well: see launcher/remote_logs.py.
    """
    hosts = []
    for host in state.hosts:
        set_aside = host.run_dir / OLD_OUTPUT_FILE
        hosts.append(replace(host, output=set_aside) if set_aside.exists() else host)
    return replace(state, hosts=tuple(hosts))


def _check_trust(
    check: Callable[..., None], *paths: Path, hint: str = "set another experiment.exp_dir"
) -> None:
    """Apply a check of :mod:`flagscale.files` to paths.

    Raises:
        RunStateError: Another user could have written what the check is about.
    """
    try:
        check(*paths)
    except PermissionError as error:
        raise RunStateError(
            f"{error.filename} {error.strerror}: it is not used for a run", hint=hint
        ) from None


def _with_moved_paths(record: dict[str, Any], path: Path, exp_dir: Path) -> dict[str, Any]:
    """Return the record with the paths of a renamed directory."""
    old_directory = str(record.get("exp_dir"))
    layout = Layout(exp_dir.absolute())
    new_directory = str(layout.exp_dir)
    is_state_of_layout = path.absolute() == layout.state or layout.runs in path.absolute().parents
    if Path(old_directory).exists() or not is_state_of_layout:
        return record
    text = json.dumps(record)
    for terminator in ("/", '"'):
        text = text.replace(
            f"{json.dumps(old_directory)[:-1]}{terminator}",
            f"{json.dumps(new_directory)[:-1]}{terminator}",
        )
    return cast(dict[str, Any], json.loads(text))


def reload_state(state: RunState) -> RunState:
    """Return the run's current state from its own directory, if that still exists; if another run
    was started there since, its last state.
    """
    layout = Layout(state.exp_dir)
    for path in (layout.state, layout.run_files(state.run_id).state):
        with suppress(RunStateError, OSError):
            current_state = _load_state(path, layout.exp_dir)
            if current_state is not None and current_state.run_id == state.run_id:
                return current_state
    return state


def read_state(record: dict[str, Any], path: Path) -> RunState:
    """Parse the JSON object of a state file.

    Raises:
        UnreadableStateError: it is not a state.
    """
    try:
        hosts: list[dict[str, Any]] = [
            {k: Path(v) if k in _PATHS else v for k, v in host.items()} for host in record["hosts"]
        ]
        typed_fields = {
            "hosts": tuple(HostState(**host) for host in hosts),
            "exp_dir": Path(record["exp_dir"]),
            "runner": RunnerHandle(**record["runner"]),
        }
        return RunState(**{**record, **typed_fields})
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableStateError(f"{path} was written by another version: {error}") from error


def new_run_id() -> str:
    """Return a unique run id: the start time and random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def make_state(plan: LaunchPlan) -> RunState:
    """Return the state of a plan that is about to start."""
    hosts = tuple(HostState(**_common_fields(HostState, host)) for host in plan.hosts)
    common_fields = {**_common_fields(RunState, plan), "hosts": hosts}
    return RunState(**common_fields, started=round(time.time(), 3))


def _common_fields(state_class: type, plan: object) -> dict[str, Any]:
    """Return the values of a plan's attributes whose names are fields of a state class."""
    return {
        field.name: getattr(plan, field.name)
        for field in fields(state_class)
        if hasattr(plan, field.name)
    }


@contextmanager
def start_lock(layout: Layout) -> Iterator[None]:
    """Hold the lock of a start, so that a concurrent start waits and then sees the run alive.

    Raises:
        RunStateError: another start holds it for too long.
    """
    from filelock import FileLock, Timeout

    with convert_disk_errors(layout):
        make_private_directory(layout.logs)
        hint = f"chmod o-w {layout.exp_dir}, or set another experiment.exp_dir"
        _check_trust(require_fixed_names, layout.exp_dir, hint=hint)
        _check_trust(require_private, layout.logs)
    lock = FileLock(layout.lock, timeout=10, mode=0o600)
    try:
        with convert_disk_errors(layout):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
    except Timeout:
        raise RunStateError(f"another launch is starting a run in {layout.exp_dir}") from None


@contextmanager
def convert_disk_errors(layout: Layout) -> Iterator[None]:
    """Convert errors of writing an experiment's files to a :class:`~flagscale.errors.ConfigError`.

    A disk that is full or read-only is a matter of the directory that the configuration names.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        path = error.filename or layout.exp_dir
        problem = Problem("experiment.exp_dir", f"{path}: {error.strerror}")
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "make room there, or set another directory" if is_full else "set another directory"
        raise ConfigError(problem, hint=hint) from None


def alive_message(state: RunState, names: Sequence[str] = ()) -> tuple[str, str]:
    """Return the message and the hint for a live run where another one is to start."""
    pids = [str(host.pid) for host in state.hosts if host.pid is not None]
    script_text = f", script pid {list_first(pids)}" if pids else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started))
    location = f" on {compress_names(names)}" if names and state.runner.type != "local" else ""
    return (
        f"run {state.run_id} of {state.name} is alive{location} in {state.exp_dir} (since {since}"
        f"{script_text})",
        f"stop it with {action_command('stop')}, or give this one another experiment.exp_dir",
    )


def save_plan(
    plan: LaunchPlan,
    config: str,
    overrides: str,
    launch: str = "",
    composed: str = "",
    changes: str = "",
) -> None:
    """Write plan, configuration and overrides on the launching machine.

    They are written next to the scripts, where those of the run before are replaced, and to the
    run's own directory (``logs/runs/<run id>``). The state of the run before is copied to the
    directory of that run, because this run replaces it.

    Args:
        plan: The plan.
        config: Text of the resolved configuration.
        overrides: Text of the overrides.
        launch: Text of the record of the start (:mod:`.launch_record`).
        composed: Text of the configuration from which the run can be started again.
        changes: Uncommitted changes of the code as a diff.
    """
    layout = plan.layout
    run_files = layout.run_files(plan.run_id)
    for directory in (layout.scripts, layout.logs / "pids", layout.runs, run_files.directory):
        make_private_directory(directory)
        _check_trust(require_private, directory)
    _set_state_aside(layout)
    plan_text = format_json(plan.to_json())
    for files in (layout, run_files):
        write_atomic(files.plan, plan_text, durable=False)
        write_atomic(files.config, config, durable=False)
        write_atomic(files.overrides, overrides, durable=False)
    for path, text in (
        (run_files.launch, launch),
        (run_files.composed, composed),
        (run_files.changes, changes),
    ):
        if text:
            write_atomic(path, text, durable=False)


def _set_state_aside(layout: Layout) -> None:
    """Copy the state of the last run, which the next one replaces, to its own directory."""
    with suppress(UnreadableStateError):
        previous = _load_state(layout.state, layout.exp_dir)
        if previous is not None:
            path = layout.run_files(previous.run_id).state
            make_private_directory(path.parent)
            write_json(path, to_plain(previous), durable=False)
