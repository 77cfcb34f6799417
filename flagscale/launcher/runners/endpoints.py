"""How the hosts of a run are reached: what its handle says, and what follows from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from flagscale.config.schema import Experiment
from flagscale.errors import RunStateError, UnreachableError
from flagscale.hosts import processes
from flagscale.hosts.executor import Endpoint
from flagscale.hosts.fan_out import Hosts
from flagscale.hosts.hostfile import Host, is_local_only
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.state import RunState


def handle(experiment: Experiment, hosts: Sequence[Host]) -> RunnerHandle:
    """The handle of a run on ``hosts``. This machine needs no SSH where it is the only one, unless
    the user asks for SSH to the hosts of a hostfile."""
    runner = experiment.runner
    asked = runner.type == "ssh" and runner.hostfile is not None
    if is_local_only(hosts) and not asked:
        return RunnerHandle("local", {"machine": os.uname().nodename})
    ways = [_way(host, runner.ssh_port) for host in hosts]
    found: dict[str, Any] = {"hosts": ways} if any(ways) else {}
    if runner.ssh_config is not None:
        found["config"] = str(runner.ssh_config)
    return RunnerHandle("ssh", found)


def _way(host: Host, ssh_port: int | None) -> dict[str, Any]:
    """What the hostfile says of how a host is reached; ``ssh_port``: where it names no port."""
    port = host.port or (ssh_port if host.via is None else None)
    way = {"via": host.via, "user": host.user, "port": port, "proxy": host.proxy}
    return {name: value for name, value in way.items() if value is not None}


def is_here(runner: RunnerHandle) -> bool:
    """Whether the only host is this machine, reached without SSH."""
    return runner.type == "local"


def require_here(state: RunState) -> None:
    """Raise :class:`UnreachableError` for a run of another machine's own, of which only files that
    machines share tell here."""
    machine = state.runner.handle.get("machine")
    boots = {host.boot_id for host in state.hosts} - {None}
    if machine not in (None, os.uname().nodename) and boots.isdisjoint({processes.boot_id()}):
        raise UnreachableError(
            f"run {state.run_id} was started on {machine}, which this machine, "
            f"{os.uname().nodename}, cannot ask",
            hint=f"give the command on {machine}",
        )


def reach(runner: RunnerHandle, names: Sequence[str]) -> Hosts:
    """The hosts of a run, to be connected to when they are first asked. Raises
    :class:`RunStateError` for a handle that is not of this version."""
    ways = runner.handle.get("hosts") or [{}] * len(names)
    try:
        endpoints = [
            Endpoint(name, **{"via": runner.type, **way})
            for name, way in zip(names, ways, strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise RunStateError(f"the run was started by another version: {error}") from error
    return Hosts(endpoints, {runner.type: runner.handle})
