"""Placement of a benchmark's ranks: number, hosts and starter; and the flags for it.

A *starter* starts the ranks (:mod:`.starters`):

- ``--slurm-mode``: srun, in an allocation;
- ``--hosts`` or ``--hosts-file``: SSH, or mpirun with ``--starter mpirun``;
- neither: this process, on its own host.

The flags include those of nccom-test, a benchmark of AWS Neuron, so that its command lines work
unchanged. It calls ranks *workers*.
"""

from __future__ import annotations

import argparse
import math
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flagscale.accelerators.registry import AUTO
from flagscale.bench.files import read_text
from flagscale.bench.options import (
    COMM,
    add_device_flag,
    from_options,
    require_at_least,
    suggest_name,
)
from flagscale.comm import registry
from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import Host, parse_hostfile
from flagscale.hosts.names import expand_pattern

NO_SETUP_SCRIPT = Path("default")
"""Value of ``--slurm-setup-script`` that selects nccom-test's own script. That installs nothing
that is needed here, so no script is run.
"""


@dataclass(frozen=True)
class Placement:
    """Ranks and the hosts they run on."""

    ranks: int | None = None
    """Total number of ranks; None: that of the launcher which started this process."""
    nodes: int = 1
    """Number of hosts."""
    backend: str = "auto"
    device: str = AUTO
    timeout: float = 300.0
    """Seconds without a finished iteration before a run is considered stuck."""
    pin: bool = False
    """Bind each rank to one CPU."""
    oversubscribe: bool = False
    """Start any number of ranks on a host."""
    address: str | None = None
    """Rendezvous address of rank 0; None: determined by the starter."""
    port: int | None = None
    """Rendezvous port; None: a free one."""
    hosts: tuple[Host, ...] = ()
    per_host: tuple[int, ...] = ()
    """Number of ranks on each of ``hosts``; as long as ``hosts``."""
    environment: tuple[tuple[str, str, str], ...] = ()
    """Variables of the ranks: host name (empty: all hosts), variable name, value."""
    starter: Literal["ssh", "mpirun"] = "ssh"
    """Starter on ``hosts``. Not used without ``hosts``, nor with ``slurm``."""
    ssh_config: Path | None = None
    log_dir: Path | None = None
    """Directory for a file with each rank's output."""
    slurm: bool = False
    """Start the ranks by srun."""
    slurm_job_id: str | None = None
    """Job to run in; None: that of this process, or a new allocation."""
    slurm_cpus: int | None = None
    """CPUs per host of a new allocation; None: Slurm's default."""
    slurm_setup: Path | None = None
    """Script to run on each host before the ranks start."""
    slurm_wait: float = 600.0
    """Longest wait for a new allocation, in seconds."""


def add_placement_flags(parser: argparse.ArgumentParser) -> Callable[..., object]:
    """Add the flags for the placement of ranks. Returns the function that adds flags to this
    group.
    """
    add = parser.add_argument_group("placement").add_argument
    add(*("-r", "--nworkers", "-np", "--nproc"), type=int, metavar="N", help="number of ranks")
    add("-N", "--nnodes", type=int, default=1, metavar="N", help="number of hosts (1)")
    add(
        "--backend",
        default="auto",
        metavar="NAME",
        help="backend, as distributed_backend in a YAML (auto)",
    )
    add(
        COMM,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="options of the backend, as train.system.comm in a YAML (flagscale comm list)",
    )
    add_device_flag(add)
    add(
        "-s",
        "--hosts",
        nargs="+",
        action="extend",
        default=[],
        metavar="HOST",
        help="hosts to start ranks on; node[01-04] stands for four",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="[HOST:]NAME=VALUE",
        help="variable of the ranks on all hosts or one: CUDA_VISIBLE_DEVICES=1, h2:LD_PRELOAD=x",
    )
    add(
        "--hosts-file",
        type=Path,
        metavar="FILE",
        help="hostfile of the launcher, or one host per line",
    )
    add("--oversubscribe", action="store_true", help="start any number of ranks on a host")
    add(
        "--starter",
        choices=("ssh", "mpirun"),
        default="ssh",
        help="starter of the ranks on --hosts (ssh)",
    )
    add("--ssh-config", type=Path, metavar="FILE", help="SSH configuration (~/.ssh/config)")
    add("--mpi-log-dir", type=Path, metavar="DIR", help="write each rank's output to a file in DIR")
    add("--data-collector-host", metavar="HOST", help="rendezvous address of rank 0 (its host's)")
    add("--data-collector-port", type=int, metavar="PORT", help="rendezvous port (a free one)")
    add("-S", "--slurm-mode", dest="slurm", action="store_true", help="start the ranks by srun")
    add("--slurm-job-id", metavar="ID", help="allocation to use (a new one)")
    add("-u", "--slurm-vcpus-per-node", type=int, metavar="N", help="CPUs per host (all)")
    add("--slurm-setup-script", type=Path, metavar="FILE", help="script to run on each host first")
    add(
        "--slurm-wait",
        type=float,
        default=600,
        metavar="S",
        help="longest wait for an allocation in seconds (600)",
    )
    return add


def require_capacity(ranks: int, cores: int, placement: Placement, host: str) -> None:
    """Refuse more ranks than a host can run, unless ``--oversubscribe`` is set.

    Raises:
        ConfigError: there are far more ranks than cores.
    """
    max_ranks = max(32, 8 * cores)
    if ranks > max_ranks and not placement.oversubscribe:
        raise ConfigError(
            f"{ranks} ranks on {host}, which has {cores} cores; at most {max_ranks} are started "
            "there",
            hint="--oversubscribe starts them nevertheless",
        )


def require_local_address(address: str | None) -> None:
    """Refuse a rendezvous address that is not this machine's.

    Raises:
        ConfigError: it is not.
    """
    try:
        family = socket.getaddrinfo(address, 0)[0][0]
        socket.create_server((address or "", 0), family=family).close()
    except OSError as error:
        raise ConfigError(
            f"--data-collector-host {address}: not an address of this machine ({error.strerror}), "
            "on which all ranks run"
        ) from error


def parse_placement(options: argparse.Namespace) -> Placement:
    """Return the placement that parsed flags describe.

    Raises:
        ConfigError: a value is wrong, or the ranks do not fit the hosts.
    """
    _check_flags(options)
    if options.slurm_setup_script == NO_SETUP_SCRIPT:
        options.slurm_setup_script = None
    hosts = parse_host_names(options.hosts) or read_host_list(options.hosts_file)
    slots = [host.slots for host in hosts if host.slots is not None]
    ranks = options.nworkers
    # If all hosts have slots, these are the number of ranks on each host, which may differ. Else
    # slots are only a limit.
    has_slots = bool(slots) and len(slots) == len(hosts)
    per_host = tuple(slots) if has_slots and ranks in (None, sum(slots)) else ()
    ranks = sum(per_host) if per_host else ranks
    nodes = max(options.nnodes, len(hosts))
    if ranks is not None and not per_host and ranks % nodes:
        raise ConfigError(f"-r {ranks}: the ranks cannot be divided equally among {nodes} hosts")
    if hosts and ranks is None:
        raise ConfigError(
            "--hosts: the number of ranks is missing: -r 16, or slots of every host: h1:8, or "
            "slots=8 in a file"
        )
    ranks_per_host = (ranks or 0) // nodes
    for host in hosts:
        if host.slots is not None and not per_host and ranks_per_host > host.slots:
            raise ConfigError(
                f"-r {ranks}: {ranks_per_host} ranks on {host.name}, which has slots={host.slots}"
            )
    return from_options(
        Placement,
        options,
        ranks=ranks,
        nodes=nodes,
        address=options.data_collector_host,
        port=options.data_collector_port,
        hosts=hosts,
        per_host=per_host or (ranks_per_host,) * len(hosts),
        environment=tuple(_parse_variable(word, hosts) for word in options.env),
        log_dir=options.mpi_log_dir,
        slurm_cpus=options.slurm_vcpus_per_node,
        slurm_setup=options.slurm_setup_script,
    )


def _check_flags(options: argparse.Namespace) -> None:
    require_at_least("-r/--nworkers", options.nworkers, 1)
    require_at_least("-N/--nnodes", options.nnodes, 1)
    require_at_least("-u/--slurm-vcpus-per-node", options.slurm_vcpus_per_node, 1)
    for flag, seconds in (("-T/--timeout", options.timeout), ("--slurm-wait", options.slurm_wait)):
        if not 0 < seconds < math.inf:
            raise ConfigError(f"{flag} {seconds:g}; expected seconds above 0")
    if options.slurm_job_id is not None and not options.slurm_job_id.isdigit():
        raise ConfigError(f"--slurm-job-id {options.slurm_job_id!r}; expected a number")
    script = options.slurm_setup_script
    if script not in (None, NO_SETUP_SCRIPT) and not script.is_file():
        raise ConfigError(f"--slurm-setup-script {script}: no such file")
    if (options.hosts or options.hosts_file) and options.slurm:
        raise ConfigError("--hosts and --slurm-mode exclude each other")
    if options.hosts and options.hosts_file:
        raise ConfigError("--hosts and --hosts-file exclude each other")
    port = options.data_collector_port
    if port is not None and not 0 < port < 2**16:
        raise ConfigError(f"--data-collector-port {port}; expected 1 to 65535")
    registry.get_backend(options.backend, source="--backend")


def _parse_variable(word: str, hosts: Sequence[Host]) -> tuple[str, str, str]:
    name, equals, value = word.partition("=")
    host, _, name = name.rpartition(":")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--env {word!r}; expected NAME=VALUE or HOST:NAME=VALUE")
    names = [known_host.name for known_host in hosts]
    if host and host not in names:
        raise ConfigError(
            f"--env {word!r}: {host!r} is not one of the hosts{suggest_name(host, names)}"
        )
    if not hosts:
        raise ConfigError(
            f"--env {word!r} needs --hosts; set variables of ranks on this machine in the shell"
        )
    return host, name, value


def parse_host_names(words: Iterable[str]) -> tuple[Host, ...]:
    """Parse hosts of a command line, where ``node[01-04]`` stands for four."""
    try:
        pairs = [_split_slots(part) for word in words for part in _split_hosts(word)]
        hosts = [Host(name, slots=slots) for part, slots in pairs for name in expand_pattern(part)]
    except ValueError as error:
        raise ConfigError(f"--hosts: {error}") from error
    _check_host_names([host.name for host in hosts], "--hosts")
    return tuple(hosts)


def _split_slots(part: str) -> tuple[str, int | None]:
    """Parse ``10.0.0.1:2``, mpirun's notation for two ranks on a host. More colons belong to an
    address.
    """
    name, colon, count = part.rpartition(":")
    has_slots = colon and ":" not in name and count.isdecimal() and int(count) > 0
    return (name, int(count)) if has_slots else (part, None)


def _split_hosts(word: str) -> list[str]:
    """Split hosts at commas, as mpirun does; a comma in brackets belongs to a range."""
    return [word] if "[" in word else [part for part in word.split(",") if part]


def read_host_list(file: Path | None) -> tuple[Host, ...]:
    """Read a hostfile of the launcher, or a plain list with one host per line."""
    if file is None:
        return ()
    text = read_text(file, f"--hosts-file {file}")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    if any("=" in line for line in lines):
        return parse_hostfile(text, file)
    if not any(lines):
        raise ConfigError(f"--hosts-file {file}: no host in it; expected one per line")
    names = [line for line in lines if line]
    _check_host_names(names, f"--hosts-file {file}")
    return tuple(Host(name) for name in names)


def _check_host_names(names: Sequence[str], source: str) -> None:
    """Check that names are valid and distinct. ``source`` is the flag they come from."""
    for name in names:
        # Such a name would later be parsed as an option.
        if not name or name.startswith("-") or any(c.isspace() for c in name):
            raise ConfigError(f"{source}: {name!r} is not a host name")
        if names.count(name) > 1:
            raise ConfigError(f"{source}: host {name!r} is named twice")
