"""The state of a run on disk: all that ``query``, ``logs`` and ``stop`` read."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from flagscale.errors import RunStateError
from flagscale.files import make_private_directory, plain, read_json, write_atomic, write_json
from flagscale.hosts.names import compress, some
from flagscale.launcher.layout import EXIT_FILE, OLD_OUTPUT_FILE, HostFiles, Layout
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle


@dataclass(frozen=True, kw_only=True)
class HostState(HostFiles):
    """One host of a started run."""

    node_rank: int
    script: Path
    pid_file: Path
    pid: int | None = None
    start_ticks: int | None = None
    boot_id: str | None = None
    """Of the host, once it has started the script."""

    def exit_record(self) -> dict[str, Any]:
        """What agent or script have written of the end of this host's part; empty if nothing."""
        return read_json(self.run_dir / EXIT_FILE) or {}

    def exit(self) -> Exit | None:
        """How the job of this host ended, if it did and could say so."""
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
            how=str(record.get("how", "")),
        )

    def set_output_aside(self) -> None:
        """Keep in the run's directory what it has printed: a later run prints to the same file."""
        if self.output.exists():
            make_private_directory(self.run_dir)
            self.output.replace(self.run_dir / OLD_OUTPUT_FILE)


@dataclass(frozen=True)
class Exit:
    """How a host's job ended. ``phase`` is ``job``, ``before_start`` (the job never began) or
    ``agent`` (the agent itself was killed); ``signal`` is what the agent was told to stop by."""

    code: int
    phase: str
    signal: int | None
    ended: float
    out_of_memory_kills: int | None = None
    failed: bool = False
    """Whether the agents named a first failure, so that a stop that came later found it so."""
    how: str = ""
    """What ``before_start`` did instead of coming to its end, in words."""


@dataclass(frozen=True)
class RunState:
    """A started run."""

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

    def save(self, path: Path) -> None:
        write_json(path, plain(self))


_PATHS = ("run_dir", "script", "output", "pid_file")


def load_state(path: Path) -> RunState | None:
    """The run that was last started; None if there was none.

    Raises :class:`RunStateError` when the file is there but isn't a state of this version.
    """
    record = read_json(path)
    if record is None:
        if path.exists():
            raise RunStateError(f"{path} is damaged", hint="remove it once the run has ended")
        return None
    return read_state(_moved(record, path), path)


def _moved(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """The record of a run whose directory has another name now: its paths there."""
    old = str(record.get("exp_dir"))
    here = str(path.absolute().parent.parent)
    if Path(old).exists() or Layout(Path(here)).state != path.absolute():
        return record
    text = json.dumps(record)
    for end in ("/", '"'):
        text = text.replace(f"{json.dumps(old)[:-1]}{end}", f"{json.dumps(here)[:-1]}{end}")
    return cast(dict[str, Any], json.loads(text))


def latest(state: RunState) -> RunState:
    """The same run as its own directory tells it now, where that is still there."""
    with suppress(RunStateError, OSError):
        now = load_state(Layout(state.exp_dir).state)
        if now is not None and now.run_id == state.run_id:
            return now
    return state


def read_state(record: dict[str, Any], path: Path) -> RunState:
    """The state in a JSON object of a file. Raises :class:`RunStateError` where it is none."""
    try:
        hosts: list[dict[str, Any]] = [
            {k: Path(v) if k in _PATHS else v for k, v in host.items()} for host in record["hosts"]
        ]
        given = {
            "hosts": tuple(HostState(**host) for host in hosts),
            "exp_dir": Path(record["exp_dir"]),
            "runner": RunnerHandle(**record["runner"]),
        }
        return RunState(**{**record, **given})
    except (KeyError, TypeError, AttributeError) as error:
        raise RunStateError(f"{path} was written by another version: {error}") from error


def new_run_id() -> str:
    """A name no other run has: when it was started, and chance."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def state_of(plan: LaunchPlan) -> RunState:
    """The state of a plan that is about to start."""
    hosts = tuple(HostState(**_same(HostState, host)) for host in plan.hosts)
    shared = {**_same(RunState, plan), "hosts": hosts}
    return RunState(**shared, started=round(time.time(), 3))


def _same(kind: type, of: object) -> dict[str, Any]:
    """What a plan says under the names of a state's fields."""
    return {
        field.name: getattr(of, field.name) for field in fields(kind) if hasattr(of, field.name)
    }


@contextmanager
def start_lock(layout: Layout) -> Iterator[None]:
    """Held while a run is being started, so that of two starts at once one waits for the other
    and then finds it alive. Raises :class:`RunStateError` when it stays held."""
    from filelock import FileLock, Timeout

    make_private_directory(layout.logs)
    try:
        with FileLock(layout.lock, timeout=10, mode=0o600):
            yield
    except Timeout:
        raise RunStateError(f"another launch is starting a run in {layout.exp_dir}") from None


def alive_message(state: RunState, names: Sequence[str] = ()) -> tuple[str, str]:
    """What is said of a run that is alive where another is to start, on the hosts of these names;
    and the hint."""
    pids = [str(host.pid) for host in state.hosts if host.pid is not None]
    script = f", script pid {some(pids)}" if pids else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started))
    where = f" on {compress(names)}" if names and state.runner.type != "local" else ""
    return (
        f"run {state.run_id} of {state.name} is alive{where} in {state.exp_dir} (since {since}"
        f"{script})",
        "stop it with action=stop, or give this one another experiment.exp_dir",
    )


def keep_plan(plan: LaunchPlan, config_text: str, overrides_text: str) -> None:
    """Write what the launching machine keeps beside the scripts: plan, configuration, overrides."""
    layout = plan.layout
    for directory in (layout.scripts, layout.logs / "pids"):
        make_private_directory(directory)
    write_json(layout.plan, plan.to_json(), durable=False)
    write_atomic(layout.config, config_text, durable=False)
    write_atomic(layout.overrides, overrides_text, durable=False)
