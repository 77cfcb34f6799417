"""Data model of a launch plan: host assignments, the plan of each host, and the plan of the run.

All classes are frozen. A dry run prints a :class:`LaunchPlan`, the launcher writes it to
``plan.json``, and a runner starts it; nothing is added to it in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config.interpolation import restore_references
from flagscale.files import to_plain
from flagscale.hosts.hostfile import Host
from flagscale.launcher.layout import HasRanks, Layout
from flagscale.launcher.liveness.options import AgentOptions
from flagscale.launcher.planning.environment import EnvironmentVariable


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that planning depends on."""

    python: str
    project: Path
    """Directory that holds the ``flagscale`` package and ``third_party``."""
    workdir: Path | None
    """Working directory of the ranks: the user's current directory; None for the project's
    directory.
    """
    cpus: int | None
    devices: Mapping[str, int] | None
    """Number of devices of each kind. Like ``cpus``, None if the machine was not probed."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables that processes started on the machine inherit."""
    interface: str | None = None
    """Network interface that reaches the other hosts; None on a run's only host."""


@dataclass(frozen=True)
class HostAssignment(HasRanks):
    """A host and its ranks in a plan. ``machine`` already reflects the settings of the host."""

    node_rank: int
    nproc: int
    first_rank: int
    host: Host
    machine: Machine
    is_spare: bool = False
    """True if the host waits without ranks; ``nproc`` is the number that it would start."""

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def device_type(self) -> str | None:
        return self.host.device_type


@dataclass(frozen=True)
class RunnerHandle:
    """Type of the runner that starts a plan, and the JSON handle with which it finds its hosts
    again.

    Only the runner itself interprets ``handle``, except for the key ``job``: the id of a
    scheduler's job, for display.
    """

    type: str
    handle: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HostPlan(HasRanks):
    """Everything one host runs. All paths are absolute on that host."""

    node_rank: int
    name: str
    device_type: str | None
    address: str
    nproc: int
    first_rank: int
    environment: tuple[EnvironmentVariable, ...]
    python_path: tuple[str, ...]
    """First entries of PYTHONPATH, ahead of the user's entries in ``environment``."""
    workdir: Path
    python: str
    agent: AgentOptions
    starter: tuple[str, ...]
    """Command that starts the ranks: torchrun, or :mod:`flagscale.launcher.rank_processes` for
    a task that is a command.
    """
    program: tuple[str, ...]
    run_dir: Path
    script: Path
    output: Path
    pid_file: Path
    before_start: str = ""
    """Shell commands before the job, including the activation of a conda environment."""
    after_stop: str = ""
    origins: tuple[tuple[str, str], ...] = ()
    """Dotted key and value of every setting that is specific to this host or its device type."""
    unprobed: bool = False
    """True if the script has to detect cores, devices and interface by itself."""
    late: bool = False
    """True if the host's name and the rendezvous address are set by its job:
    :mod:`.deferred_values`.
    """

    @property
    def is_spare(self) -> bool:
        """True if the host waits, without ranks, until it takes the place of a lost host."""
        return self.agent.is_spare

    @property
    def secrets(self) -> dict[str, str]:
        """Environment variables whose values must not be written to any file."""
        return {value.name: value.value for value in self.environment if value.secret}

    def to_json(self) -> dict[str, Any]:
        environment = [value.to_json() for value in self.environment]
        fields = {
            **vars(self),
            "environment": environment,
            # ${host:NAME} instead of the internal form of references to the host's variables.
            "starter": restore_references(self.starter),
        }
        return dict(to_plain(fields))


@dataclass(frozen=True)
class BatchJob:
    """A scheduler's job for a plan: the submit command, and the job script in the file that it
    names.
    """

    command: tuple[str, ...]
    file: Path
    script: str


@dataclass(frozen=True)
class LaunchPlan:
    """Plan of a whole run, with one :class:`HostPlan` per host."""

    run_id: str
    name: str
    exp_dir: Path
    log_dir: Path | None
    master_addr: str
    master_port: int
    hosts: tuple[HostPlan, ...]
    external: bool
    """True if the program may not be part of this project, and so may report no status."""
    start_timeout: float
    stop_grace: float
    runner: RunnerHandle
    notes: tuple[str, ...] = ()
    shared_fs: bool = True
    """True if the hosts and this machine share a file system."""
    liveness_port: int | None = None
    """Port on the master's host at which the agents rendezvous; None on a run's only host."""
    job: BatchJob | None = None
    """Batch job that starts the hosts' scripts, if a scheduler does. Ports that it chooses are 0
    here.
    """

    @property
    def world_size(self) -> int:
        return sum(host.nproc for host in self.hosts)

    @property
    def layout(self) -> Layout:
        return Layout(self.exp_dir, self.log_dir)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data, without the values of secrets.

        ``hosts`` is an iterator, so that a plan of thousands of hosts need not be in memory at
        once: :func:`flagscale.files.format_json`.
        """
        hosts: Iterator[dict[str, Any]] = (host.to_json() for host in self.hosts)
        record = to_plain(
            {
                **vars(self),
                "master_addr": restore_references(self.master_addr),
                "hosts": None,
                "world_size": self.world_size,
            }
        )
        return {**record, "hosts": hosts}
