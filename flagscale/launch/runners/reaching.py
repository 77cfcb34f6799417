"""How the hosts of a run are reached: what its handle says, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flagscale.config.schema import Experiment
from flagscale.hosts.executor import Endpoint
from flagscale.hosts.fan_out import Hosts
from flagscale.hosts.hostfile import Host, is_local_only
from flagscale.launch.planning.model import RunnerHandle


def handle(experiment: Experiment, hosts: Sequence[Host]) -> RunnerHandle:
    """The handle of a run on ``hosts``. This machine needs no SSH where it is the only one, unless
    the user asks for SSH to the hosts of a hostfile."""
    runner = experiment.runner
    asked = runner.type == "ssh" and runner.hostfile is not None
    if is_local_only(hosts) and not asked:
        return RunnerHandle("local")
    ways = [
        _without_none(
            via=host.via,
            user=host.user,
            port=host.port or (runner.ssh_port if host.via is None else None),
            proxy=host.proxy,
        )
        for host in hosts
    ]
    found: dict[str, Any] = {"hosts": ways} if any(ways) else {}
    if runner.ssh_config is not None:
        found["config"] = str(runner.ssh_config)
    return RunnerHandle("ssh", found)


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def is_here(runner: RunnerHandle) -> bool:
    """Whether the only host is this machine, reached without SSH."""
    return runner.type == "local"


def reach(runner: RunnerHandle, names: Sequence[str]) -> Hosts:
    """The hosts of a run, to be connected to when they are first asked."""
    ways = runner.handle.get("hosts") or [{}] * len(names)
    endpoints = [
        Endpoint(name, **{"via": runner.type, **way}) for name, way in zip(names, ways, strict=True)
    ]
    return Hosts(endpoints, {runner.type: runner.handle})
