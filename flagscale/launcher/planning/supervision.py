"""Options and environment of the agent of a host.

The options are part of the script. Secrets, whose values neither a script nor a plan contains, are
passed in the environment of the script, which hands them to the agent alone. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from flagscale.accelerators.registry import AUTO
from flagscale.config.schema import Runner
from flagscale.launcher.liveness import secret
from flagscale.launcher.liveness.options import (
    NOTIFY_COMMAND_VARIABLE,
    NOTIFY_WEBHOOK_VARIABLE,
    AgentOptions,
    compress_positions,
)
from flagscale.launcher.planning.environment import EnvironmentVariable
from flagscale.launcher.planning.model import HostAssignment

NOTIFY_ORIGIN = "runner.notify"
"""Origin, in a plan, of the variables that only hosts which send notifications have."""
AGENT_SECRETS = (secret.SECRET_VARIABLE, NOTIFY_WEBHOOK_VARIABLE)
"""Environment variables that the script passes to the agent only."""
_LAST_PORT = 65535
_NOTIFYING_HOSTS = 2
"""Host 0 sends notifications, and host 1 does when host 0 is lost. With ``on_bad_host``, every host
may coordinate the run, and sends them then.
"""
_RUNNER_OPTIONS = {f.name for f in fields(AgentOptions)} & {f.name for f in fields(Runner)} - {
    "node_rank"
}
"""Names of the agent options that are keys of the runner. The node rank is the assignment's."""


@dataclass(frozen=True)
class AgentRendezvous:
    """Rendezvous of the agents of several hosts.

    Attributes:
        address: Address of host 0.
        port: Port of host 0 at which the agents connect.
        host_names: Names of all hosts, as ranges.
        master_name: Name of host 0.
        addresses: Addresses of the hosts after host 0, as ranges.
        secret: Secret shared by the agents; None if each agent watches its host alone.
        mesh_positions: Positions of each host's ranks in the heterogeneous meshes; empty for a
            homogeneous run.
    """

    address: str
    port: int
    host_names: tuple[str, ...]
    master_name: str
    addresses: tuple[str, ...]
    secret: str | None
    mesh_positions: tuple[str, ...] = ()


def liveness_port(runner: Runner, master_port: int) -> int:
    """Return the port of host 0 at which the agents rendezvous
    (:mod:`flagscale.launcher.liveness`).

    It is the user's, else the port next to the ranks' port.
    """
    neighbor = master_port + 1 if master_port < _LAST_PORT else master_port - 1
    return runner.liveness_port or neighbor


def agent_options(
    runner: Runner,
    run_name: str,
    assignment: HostAssignment,
    run_dir: Path,
    rendezvous: AgentRendezvous | None,
    *,
    reports_status: bool = True,
    device: str = AUTO,
    saves_when_stopped: bool = False,
) -> AgentOptions:
    """Return the options of a host's agent.

    Without a rendezvous the agent watches its host alone. ``device`` is the kind of device that the
    YAML requests, and ``saves_when_stopped`` is True if ranks save a checkpoint on SIGTERM.
    """
    options = {name: getattr(runner, name) for name in _RUNNER_OPTIONS}
    options |= {"master_addr": "", "liveness_port": None}
    if runner.on_bad_host == "stop":
        # Hosts are measured before the run only.
        options["health"], device = "off", AUTO
    if rendezvous is not None:
        options |= {"master_addr": rendezvous.address, "liveness_port": rendezvous.port}
        if runner.on_bad_host != "stop" and runner.type != "slurm":
            # Under Slurm, the first node also runs the job's batch script.
            options["addresses"] = rendezvous.addresses
        if assignment.node_rank == 0 or runner.on_bad_host != "stop":
            options["hosts"] = rendezvous.host_names
            options["saves_when_stopped"] = saves_when_stopped and runner.on_bad_host == "shrink"
            # The agent's options have the older name for mesh positions, which stored plans
            # contain.
            options["places"] = tuple(compress_positions(rendezvous.mesh_positions))
        if assignment.node_rank:
            options["master_name"] = rendezvous.master_name
            options["master_place"] = "".join(rendezvous.mesh_positions[:1])
    if runner.notify is not None and _may_notify(runner, assignment):
        options["notify_on"] = runner.notify.on
    return AgentOptions(
        run_name=run_name,
        run_dir=run_dir,
        name=assignment.host.name,
        node_rank=assignment.node_rank,
        first_rank=assignment.first_rank,
        nproc=assignment.nproc,
        reports_status=reports_status,
        is_spare=assignment.is_spare,
        device=device,
        **options,
    )


def agent_environment(
    runner: Runner, assignment: HostAssignment, rendezvous: AgentRendezvous | None
) -> Iterator[EnvironmentVariable]:
    """Yield the variables that a host's script passes to its agent."""
    if rendezvous is not None and rendezvous.secret is not None:
        yield EnvironmentVariable(
            secret.SECRET_VARIABLE, rendezvous.secret, origin="run", secret=True
        )
    notify = runner.notify
    if notify is None or not _may_notify(runner, assignment):
        return
    if notify.command:
        yield EnvironmentVariable(NOTIFY_COMMAND_VARIABLE, notify.command, origin=NOTIFY_ORIGIN)
    if notify.webhook:
        yield EnvironmentVariable(
            NOTIFY_WEBHOOK_VARIABLE, notify.webhook, origin=NOTIFY_ORIGIN, secret=True
        )


def _may_notify(runner: Runner, assignment: HostAssignment) -> bool:
    return runner.on_bad_host != "stop" or assignment.node_rank < _NOTIFYING_HOSTS
