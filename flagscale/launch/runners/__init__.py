"""Ways of starting a plan's hosts, one file each, with the same verbs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flagscale.config.schema import Runner as RunnerKeys
from flagscale.hosts.hostfile import Host
from flagscale.launch.planning.model import RunnerHandle

if TYPE_CHECKING:
    from flagscale.launch.runners.base import Runner
    from flagscale.launch.state import RunState


def runner_of(state: RunState) -> Runner:
    """The runner that looks after a run that was started before."""
    if state.over_ssh:
        from flagscale.launch.runners.ssh import SshRunner

        return SshRunner()
    from flagscale.launch.runners.local import LocalRunner

    return LocalRunner()


def ssh_handle(runner: RunnerKeys, hosts: Sequence[Host]) -> RunnerHandle:
    """How the hosts of a run are found again over SSH, where that differs from the user's SSH
    configuration."""
    places = []
    for host in hosts:
        given = {"user": host.user, "port": host.port or runner.ssh_port, "proxy": host.proxy}
        places.append({key: value for key, value in given.items() if value is not None})
    config = str(runner.ssh_config) if runner.ssh_config else None
    return RunnerHandle("ssh", {"ssh_config": config, "hosts": places})
