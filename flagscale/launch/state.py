"""The state of a run on disk: all that ``query``, ``logs`` and ``stop`` read."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flagscale.errors import RunStateError
from flagscale.files import make_private_directory, plain, read_json, write_json
from flagscale.hosts import processes
from flagscale.hosts.processes import Process
from flagscale.launch.layout import AGENT_FILE, EXIT_FILE, Layout
from flagscale.launch.planning.model import HostPlan, LaunchPlan, RunnerHandle


@dataclass(frozen=True)
class HostState:
    """One host of a started run."""

    node_rank: int
    name: str
    nproc: int
    first_rank: int
    run_dir: Path
    script: Path
    output: Path
    pid_file: Path
    pid: int | None = None
    start_ticks: int | None = None
    boot_id: str | None = None
    """Of the host at the start; None where the run's own holds: on this machine."""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nproc)

    def process(self) -> Process | None:
        """The host's script, as it was started."""
        if self.pid is None or self.start_ticks is None:
            return None
        return Process(self.pid, self.start_ticks)

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

    def agent(self) -> Process | None:
        """The agent that watches the job, if it is alive."""
        record = read_json(self.run_dir / AGENT_FILE)
        if record is None or record.get("boot_id") != processes.boot_id():
            return None
        process = Process(int(record["pid"]), int(record["start_ticks"]))
        return process if processes.is_alive(process) else None


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
    boot_id: str
    world_size: int
    external: bool
    stop_grace: float
    hosts: tuple[HostState, ...] = ()
    stop_requested: float | None = field(default=None)
    shared_fs: bool = True
    runner: RunnerHandle = field(default=RunnerHandle("local"))
    """Who looks after it."""

    @property
    def over_ssh(self) -> bool:
        """Whether its hosts are reached by SSH: then this machine's processes tell nothing."""
        return self.runner.type == "ssh"

    def save(self, path: Path) -> None:
        write_json(path, plain(self))

    def alive(self) -> list[Process]:
        """Every living process of the run on this machine."""
        return processes.members(self.run_id)

    def is_alive(self) -> bool:
        """Whether any process of the run lives. The script's own pid answers first: it spares
        reading every process's environment."""
        if self.boot_id == processes.boot_id():
            for host in self.hosts:
                script = host.process()
                if script is not None and processes.is_alive(script):
                    return True
        return bool(self.alive())


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
    try:
        if "runner" not in record:
            record = _modern(record)
        hosts = tuple(HostState(**_with_paths(host)) for host in record.pop("hosts"))
        exp_dir, runner = Path(record.pop("exp_dir")), RunnerHandle(**record.pop("runner"))
        return RunState(hosts=hosts, exp_dir=exp_dir, runner=runner, **record)
    except (KeyError, TypeError, AttributeError) as error:
        raise RunStateError(f"{path} was written by another version: {error}") from error


def _with_paths(record: dict[str, Any]) -> dict[str, Any]:
    return {key: Path(value) if key in _PATHS else value for key, value in record.items()}


def _modern(record: dict[str, Any]) -> dict[str, Any]:
    """A state as it was written before it named its runner: such a run is to be stopped too."""
    hosts = [{"node_rank" if k == "rank" else k: v for k, v in h.items()} for h in record["hosts"]]
    ssh, config = [host.pop("ssh", None) for host in hosts], record.pop("ssh_config", None)
    places = [{k: v for k, v in (place or {}).items() if v is not None} for place in ssh]
    over_ssh = any(place is not None for place in ssh)
    runner = {"type": "ssh", "handle": {"ssh_config": config, "hosts": places}}
    return {**record, "hosts": hosts, "runner": runner if over_ssh else {"type": "local"}}


def new_run_id() -> str:
    """A name no other run has: when it was started, and chance."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def state_of(plan: LaunchPlan) -> RunState:
    """The state of a plan that is about to start."""
    return RunState(
        run_id=plan.run_id,
        name=plan.name,
        exp_dir=plan.exp_dir,
        started=round(time.time(), 3),
        boot_id=processes.boot_id(),
        world_size=plan.world_size,
        external=plan.external,
        stop_grace=plan.stop_grace,
        hosts=tuple(_host_state(host) for host in plan.hosts),
        shared_fs=plan.shared_fs,
        runner=plan.runner,
    )


def _host_state(host: HostPlan) -> HostState:
    return HostState(
        node_rank=host.node_rank,
        name=host.name,
        nproc=host.nproc,
        first_rank=host.first_rank,
        run_dir=host.run_dir,
        script=host.script,
        output=host.output,
        pid_file=host.pid_file,
    )


def with_process(
    state: RunState, node_rank: int, process: Process, boot_id: str | None = None
) -> RunState:
    """The state with the started script of one host."""
    hosts = list(state.hosts)
    hosts[node_rank] = replace(
        hosts[node_rank], pid=process.pid, start_ticks=process.start_ticks, boot_id=boot_id
    )
    return replace(state, hosts=tuple(hosts))


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


def refuse_if_alive(state: RunState | None) -> None:
    """Raise :class:`RunStateError` naming the run that is alive in this directory."""
    if state is None or not state.is_alive():
        return
    pids = [str(host.pid) for host in state.hosts if host.pid is not None]
    script = f"script pid {', '.join(pids)}" if pids else "just being started"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started))
    raise RunStateError(
        f"run {state.run_id} of {state.name} is alive in {state.exp_dir} (since {since}, {script})",
        hint="stop it with action=stop, or give this one another experiment.exp_dir",
    )
