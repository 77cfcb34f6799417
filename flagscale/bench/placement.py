"""The ranks of a measurement: how many, on which hosts, started by what; and the flags for that."""

from __future__ import annotations

import argparse
import math
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flagscale.accelerators.registry import AUTO
from flagscale.bench.command_line import COMM, add_device, at_least, did_you_mean, filled
from flagscale.bench.files import read_text
from flagscale.comm import registry
from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import Host, parse_hostfile
from flagscale.hosts.names import expand

DEFAULT_SETUP = Path("default")
"""The setup script that nccom-test brings: it installs what nobody needs here."""


@dataclass(frozen=True)
class Placement:
    """The ranks and what they run on."""

    workers: int | None = None
    nodes: int = 1
    backend: str = "auto"
    device: str = AUTO
    timeout: float = 300.0
    """Seconds without a finished iteration after which a run counts as stuck."""
    pin: bool = False
    oversubscribe: bool = False
    """Start however many ranks a host has to carry."""
    address: str | None = None
    port: int | None = None
    hosts: tuple[Host, ...] = ()
    per_host: tuple[int, ...] = ()
    """Ranks of each of ``hosts``."""
    environment: tuple[tuple[str, str, str], ...] = ()
    """Variables of the ranks: of which host (empty: of all), name and value."""
    starter: Literal["ssh", "mpirun"] = "ssh"
    ssh_config: Path | None = None
    log_dir: Path | None = None
    slurm: bool = False
    slurm_job: str | None = None
    slurm_cpus: int | None = None
    slurm_setup: Path | None = None
    slurm_wait: float = 600.0
    """Seconds in the queue before a new allocation is given up."""


def add_place(parser: argparse.ArgumentParser) -> Callable[..., object]:
    """The flags that say which ranks run where, for every command that has ranks on hosts; what
    adds more of them."""
    add = parser.add_argument_group("where").add_argument
    add(*("-r", "--nworkers", "-np", "--nproc"), type=int, metavar="N", help="number of ranks")
    add("-N", "--nnodes", type=int, default=1, metavar="N", help="number of hosts (1)")
    add("--backend", default="auto", metavar="NAME", help="as distributed_backend in a YAML (auto)")
    options = "options of the backend, as train.system.comm in a YAML (flagscale comm list)"
    add(COMM, nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=options)
    add_device(add)
    add("-s", "--hosts", nargs="+", action="extend", default=[], metavar="HOST", help="start there")
    variable = "set for the ranks of --hosts, or of one: CUDA_VISIBLE_DEVICES=1, h2:LD_PRELOAD=x"
    add("--env", action="append", default=[], metavar="[HOST:]NAME=VALUE", help=variable)
    add("--hosts-file", type=Path, metavar="FILE", help="a host a line, or the launcher's hostfile")
    add("--oversubscribe", action="store_true", help="start any number of ranks on a host")
    add("--starter", choices=("ssh", "mpirun"), default="ssh", help="what reaches --hosts (ssh)")
    add("--ssh-config", type=Path, metavar="FILE", help="instead of ~/.ssh/config")
    add("--mpi-log-dir", type=Path, metavar="DIR", help="a file for every rank's output")
    add("--data-collector-host", metavar="HOST", help="where rank 0 collects (its own)")
    add("--data-collector-port", type=int, metavar="PORT", help="its port (a free one)")
    add("-S", "--slurm-mode", dest="slurm", action="store_true", help="start by srun")
    add("--slurm-job-id", dest="slurm_job", metavar="ID", help="in this allocation (a new one)")
    add("-u", "--slurm-vcpus-per-node", type=int, metavar="N", help="CPUs of a host (what it has)")
    add("--slurm-setup-script", type=Path, metavar="FILE", help="run on each host before")
    add("--slurm-wait", type=float, default=600, metavar="S", help="longest wait in queue (600)")
    return add


def require_room(ranks: int, cores: int, place: Placement, host: str) -> None:
    """Refuse ranks under which a host would stand still, unless the user insists.

    Raises:
        ConfigError: they are far more than its cores.
    """
    most = max(32, 8 * cores)
    if ranks > most and not place.oversubscribe:
        raise ConfigError(
            f"{ranks} ranks on {host}, which has {cores} cores; at most {most} are started there",
            hint="--oversubscribe starts them all the same",
        )


def require_own(address: str | None) -> None:
    """Raise :class:`ConfigError` for an address at which ranks of this machine cannot meet."""
    try:
        family = socket.getaddrinfo(address, 0)[0][0]
        socket.create_server((address or "", 0), family=family).close()
    except OSError as error:
        text = f"--data-collector-host {address}: all ranks are on this machine, which is another"
        raise ConfigError(f"{text} ({error.strerror})") from error


def placement(options: argparse.Namespace) -> Placement:
    """The ranks that parsed flags ask for.

    Raises:
        ConfigError: a value is wrong, or the ranks do not fit the hosts.
    """
    _check(options)
    if options.slurm_setup_script == DEFAULT_SETUP:
        options.slurm_setup_script = None
    hosts = named_hosts(options.hosts) or listed_hosts(options.hosts_file)
    slots = [host.slots for host in hosts if host.slots is not None]
    workers = options.nworkers
    # A hostfile says how many ranks each host takes; they need not be equally many.
    per_host = tuple(slots) if slots and workers in (None, sum(slots)) else ()
    workers = sum(per_host) if per_host else workers
    nodes = max(options.nnodes, len(hosts))
    if workers is not None and not per_host and workers % nodes:
        raise ConfigError(f"-r {workers} ranks cannot be divided equally among {nodes} hosts")
    if hosts and workers is None:
        raise ConfigError("--hosts: the number of ranks is missing: -r 16, or a file with slots=")
    each = (workers or 0) // nodes
    for host in hosts:
        if host.slots is not None and not per_host and each > host.slots:
            raise ConfigError(f"-r {workers}: {each} ranks on {host.name}, slots={host.slots}")
    return filled(
        Placement,
        options,
        workers=workers,
        nodes=nodes,
        address=options.data_collector_host,
        port=options.data_collector_port,
        hosts=hosts,
        per_host=per_host or (each,) * len(hosts),
        environment=tuple(_variable(word, hosts) for word in options.env),
        log_dir=options.mpi_log_dir,
        slurm_cpus=options.slurm_vcpus_per_node,
        slurm_setup=options.slurm_setup_script,
    )


def _check(options: argparse.Namespace) -> None:
    at_least("-r/--nworkers", options.nworkers, 1)
    at_least("-N/--nnodes", options.nnodes, 1)
    at_least("-u/--slurm-vcpus-per-node", options.slurm_vcpus_per_node, 1)
    for flag, seconds in (("-T/--timeout", options.timeout), ("--slurm-wait", options.slurm_wait)):
        if not 0 < seconds < math.inf:
            raise ConfigError(f"{flag} {seconds:g}; expected seconds above 0")
    if options.slurm_job is not None and not options.slurm_job.isdigit():
        raise ConfigError(f"--slurm-job-id {options.slurm_job!r}; expected a number")
    script = options.slurm_setup_script
    if script not in (None, DEFAULT_SETUP) and not script.is_file():
        raise ConfigError(f"--slurm-setup-script {script}: no such file")
    if (options.hosts or options.hosts_file) and options.slurm:
        raise ConfigError("--hosts and --slurm-mode exclude each other")
    if options.hosts and options.hosts_file:
        raise ConfigError("--hosts and --hosts-file exclude each other")
    port = options.data_collector_port
    if port is not None and not 0 < port < 2**16:
        raise ConfigError(f"--data-collector-port {port}; expected 1 to 65535")
    registry.backend(options.backend, given_by="--backend")


def _variable(word: str, hosts: Sequence[Host]) -> tuple[str, str, str]:
    name, equals, value = word.partition("=")
    host, _, name = name.rpartition(":")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--env {word!r}; expected NAME=VALUE or HOST:NAME=VALUE")
    names = [one.name for one in hosts]
    if host and host not in names:
        raise ConfigError(f"--env {word!r}: {host} is none of --hosts{did_you_mean(host, names)}")
    if not hosts:
        raise ConfigError(f"--env {word!r} needs --hosts; here the shell sets it")
    return host, name, value


def named_hosts(words: Iterable[str]) -> tuple[Host, ...]:
    """Hosts of the command line, where ``node[01-04]`` stands for four."""
    try:
        pairs = [_slots(part) for word in words for part in _parts(word)]
        found = [Host(name, slots=slots) for part, slots in pairs for name in expand(part)]
    except ValueError as error:
        raise ConfigError(f"--hosts: {error}") from error
    _distinct([host.name for host in found], "--hosts")
    return tuple(found)


def _slots(part: str) -> tuple[str, int | None]:
    """``10.0.0.1:2``, as mpirun writes two ranks on a host; more colons are an address's own."""
    name, colon, count = part.rpartition(":")
    counted = colon and ":" not in name and count.isdecimal() and int(count) > 0
    return (name, int(count)) if counted else (part, None)


def _parts(word: str) -> list[str]:
    """Hosts with commas between them, as mpirun takes them; a comma in a bracket is a range's."""
    return [word] if "[" in word else [part for part in word.split(",") if part]


def listed_hosts(file: Path | None) -> tuple[Host, ...]:
    """A hostfile of the launcher, or a plain list: a host a line."""
    if file is None:
        return ()
    text = read_text(file, f"--hosts-file {file}")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    if any("=" in line for line in lines):
        return parse_hostfile(text, file)
    if not any(lines):
        raise ConfigError(f"--hosts-file {file}: no host in it; expected one a line")
    return _distinct([line for line in lines if line], f"--hosts-file {file}")


def _distinct(names: list[str], source: str) -> tuple[Host, ...]:
    for name in names:
        # Such a name would be taken for an option further on.
        if not name or name.startswith("-") or any(c.isspace() for c in name):
            raise ConfigError(f"{source}: {name!r} is no host name")
        if names.count(name) > 1:
            raise ConfigError(f"{source}: host {name!r} is named twice")
    return tuple(Host(name) for name in names)
