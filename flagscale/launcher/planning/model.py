"""What a plan is made of, from a host's slot in it to the whole. Frozen, each built once.

Everything in a :class:`LaunchPlan` is shown by a dry run, written to ``plan.json`` and started by a
runner; nothing is added to it on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config.interpolation import readable
from flagscale.files import plain
from flagscale.hosts.hostfile import Host
from flagscale.launcher.layout import HasRanks, Layout
from flagscale.launcher.liveness.options import AgentOptions
from flagscale.launcher.planning.environment import EnvValue
from flagscale.launcher.planning.per_host import Settings


@dataclass(frozen=True)
class Machine:
    """What planning needs to know of a machine."""

    python: str
    project: Path
    """Directory that holds the ``flagscale`` package and ``third_party``."""
    workdir: Path | None
    """The ranks' working directory: where the user started; None for the project's directory."""
    cpus: int | None
    devices: Mapping[str, int] | None
    """How many of each kind; None, as for ``cpus``, where the machine has not been asked."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What processes started there inherit."""
    interface: str | None = None
    """The network interface over which it reaches the other hosts, where there are others."""


@dataclass(frozen=True)
class HostAssignment(HasRanks):
    """A host's position in the plan, with all that is known of it. ``machine`` is what the host is
    like once ``settings``, what the experiment says of it, hold there."""

    node_rank: int
    nproc: int
    first_rank: int
    host: Host
    machine: Machine
    settings: Settings

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def device_type(self) -> str | None:
        return self.host.device_type


@dataclass(frozen=True)
class RunnerHandle:
    """Which runner starts a plan, and what it needs to find its hosts again: JSON that nobody
    else reads."""

    type: str
    handle: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HostPlan(HasRanks):
    """What one host runs. Every path is absolute on that host."""

    node_rank: int
    name: str
    device_type: str | None
    address: str
    nproc: int
    first_rank: int
    environment: tuple[EnvValue, ...]
    python_path: tuple[str, ...]
    """What stands first in PYTHONPATH, before the user's own entries in ``environment``."""
    workdir: Path
    python: str
    agent: AgentOptions
    starter: tuple[str, ...]
    """What starts its ranks: torchrun, or of a command :mod:`flagscale.launcher.rank_processes`."""
    program: tuple[str, ...]
    run_dir: Path
    script: Path
    output: Path
    pid_file: Path
    before_start: str = ""
    """Shell commands before the job, the activation of an environment among them."""
    after_stop: str = ""
    origins: tuple[tuple[str, str], ...] = ()
    """What this host's type or name changed: dotted key and value."""
    unprobed: bool = False
    """Whether its script has to find out by itself what the host is like."""
    late: bool = False
    """Whether it learns from its job what it is called and where ranks meet: :mod:`.late`."""

    @property
    def secrets(self) -> dict[str, str]:
        """Those of its variables that no file may hold."""
        return {value.name: value.value for value in self.environment if value.secret}

    def to_json(self) -> dict[str, Any]:
        environment = [value.to_json() for value in self.environment]
        given = {**vars(self), "environment": environment, "starter": readable(self.starter)}
        return dict(plain(given))


@dataclass(frozen=True)
class BatchJob:
    """What a scheduler is given of a plan: the command that submits it and, as the file that this
    names, the script."""

    command: tuple[str, ...]
    file: Path
    script: str


@dataclass(frozen=True)
class LaunchPlan:
    """A whole run, host by host."""

    run_id: str
    name: str
    exp_dir: Path
    log_dir: Path | None
    master_addr: str
    master_port: int
    hosts: tuple[HostPlan, ...]
    external: bool
    """Whether the program may not be ours, and so may report no status."""
    start_timeout: float
    stop_grace: float
    runner: RunnerHandle
    notes: tuple[str, ...] = ()
    shared_fs: bool = True
    """Whether the hosts and this machine see the same files."""
    liveness_port: int | None = None
    """Where the agents meet on the master's host; None on a run's only host."""
    job: BatchJob | None = None
    """What starts the hosts' scripts, where a scheduler does. Ports that it picks are 0 here."""

    @property
    def world_size(self) -> int:
        return sum(host.nproc for host in self.hosts)

    @property
    def layout(self) -> Layout:
        return Layout(self.exp_dir, self.log_dir)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, without the values of secrets. Its hosts come one by one, so
        that thousands need not lie in memory at once: :func:`flagscale.files.json_text`."""
        hosts: Iterator[dict[str, Any]] = (host.to_json() for host in self.hosts)
        own = {"hosts": None, "world_size": self.world_size}
        record = plain({**vars(self), "master_addr": readable(self.master_addr), **own})
        return {**record, "hosts": hosts}
