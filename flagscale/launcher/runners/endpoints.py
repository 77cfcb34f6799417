"""Conversion between a run's hosts, its runner handle and the endpoints to connect to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from flagscale.config.schema import Runner
from flagscale.errors import RunStateError, UnreachableError
from flagscale.hosts import processes
from flagscale.hosts.connection import Endpoint
from flagscale.hosts.fan_out import Hosts
from flagscale.hosts.hostfile import Host, is_local_only
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.state import RunState


def make_handle(runner: Runner, hosts: Sequence[Host]) -> RunnerHandle:
    """Return the handle of a run on ``hosts``: all that later commands need to connect to them.

    If this machine is the only host, no SSH is used, unless the runner's type is ``ssh`` and there
    is a hostfile or a list of hosts.
    """
    ssh_requested = runner.type == "ssh" and runner.names_hosts
    if is_local_only(hosts) and not ssh_requested:
        return RunnerHandle("local", {"machine": os.uname().nodename})
    host_options = [_endpoint_options(host, runner.ssh_port) for host in hosts]
    handle: dict[str, Any] = {"hosts": host_options} if any(host_options) else {}
    if runner.ssh_config is not None:
        handle["config"] = str(runner.ssh_config)
    return RunnerHandle("ssh", handle)


def _endpoint_options(host: Host, ssh_port: int | None) -> dict[str, Any]:
    """Return the connection options of a host that its hostfile sets.

    ``ssh_port`` is the port of hosts that are reached over SSH and set none.
    """
    port = host.port or (ssh_port if host.via is None else None)
    options = {"via": host.via, "user": host.user, "port": port, "proxy": host.proxy}
    return {name: value for name, value in options.items() if value is not None}


def is_local(runner: RunnerHandle) -> bool:
    """Return True if the only host is this machine, without SSH."""
    return runner.type == "local"


def require_same_machine(state: RunState) -> None:
    """Check that a run without SSH was started on this machine.

    Its state may be visible on other machines through a shared file system.

    Raises:
        UnreachableError: If the run was started on another machine.
    """
    machine = state.runner.handle.get("machine")
    boot_ids = {host.boot_id for host in state.hosts} - {None}
    # The boot id identifies a machine whose name has changed since.
    is_same_boot = processes.read_boot_id() in boot_ids
    if machine not in (None, os.uname().nodename) and not is_same_boot:
        raise UnreachableError(
            f"run {state.run_id} was started on {machine}, which this machine, "
            f"{os.uname().nodename}, cannot query",
            hint=f"run the command on {machine}",
        )


def open_hosts(runner: RunnerHandle, names: Sequence[str]) -> Hosts:
    """Return the hosts of a run; connections are opened on first use.

    Raises:
        RunStateError: If the handle was written by another version.
    """
    host_options = runner.handle.get("hosts") or [{}] * len(names)
    try:
        endpoints = [
            Endpoint(name, **{"via": runner.type, **options})
            for name, options in zip(names, host_options, strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise RunStateError(f"the run was started by another version: {error}") from error
    return Hosts(endpoints, {runner.type: runner.handle})
