"""From parsed flags to a :class:`Placement`: how many ranks, on which hosts, started by what."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

from flagscale.bench.collectives.spec import Placement
from flagscale.comm import registry
from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import Host, parse_hostfile
from flagscale.hosts.names import expand


def at_least(flag: str, value: int | None, least: int) -> None:
    """Refuse a number that is too small.

    Raises:
        ConfigError: ``value`` is less than ``least``.
    """
    if value is not None and value < least:
        raise ConfigError(f"{flag} {value}; expected at least {least}")


def placement(options: argparse.Namespace) -> Placement:
    """The ranks that parsed flags ask for.

    Raises:
        ConfigError: a value is wrong, or the ranks do not fit the hosts.
    """
    _check(options)
    hosts = _named(options.hosts) or _listed(options.hosts_file)
    slots = [host.slots for host in hosts if host.slots is not None]
    workers = options.nworkers
    # A hostfile says how many ranks each host takes; they need not be equally many.
    shares = tuple(slots) if slots and workers is None else ()
    workers = sum(shares) if shares else workers
    nodes = max(options.nnodes, len(hosts))
    if workers is not None and not shares and workers % nodes:
        raise ConfigError(f"-r {workers} ranks cannot be divided equally among {nodes} hosts")
    if hosts and workers is None:
        raise ConfigError("--hosts: the number of ranks is missing: -r 16, or a file with slots=")
    for host in hosts:
        if host.slots is not None and not shares and (workers or 0) // nodes > host.slots:
            each = (workers or 0) // nodes
            raise ConfigError(f"-r {workers}: {each} ranks on {host.name}, slots={host.slots}")
    return Placement(
        workers=workers,
        nodes=nodes,
        backend=options.backend,
        device=options.device,
        timeout=options.timeout,
        pin=options.vcpu_pin_mode,
        address=options.data_collector_host,
        port=options.data_collector_port,
        hosts=hosts,
        shares=shares or tuple((workers or 0) // nodes for _ in hosts),
        starter=options.starter,
        ssh_config=options.ssh_config,
        log_dir=options.mpi_log_dir,
        slurm=options.slurm_mode,
        slurm_job=options.slurm_job_id,
        slurm_cpus=options.slurm_vcpus_per_node,
        slurm_setup=options.slurm_setup_script,
        slurm_wait=options.slurm_wait,
    )


def _check(options: argparse.Namespace) -> None:
    at_least("-r/--nworkers", options.nworkers, 1)
    at_least("-N/--nnodes", options.nnodes, 1)
    at_least("-u/--slurm-vcpus-per-node", options.slurm_vcpus_per_node, 1)
    if options.ngpus != 1:
        raise ConfigError(f"-g {options.ngpus}: one rank drives one GPU; give more ranks with -r")
    for flag, seconds in (("-T/--timeout", options.timeout), ("--slurm-wait", options.slurm_wait)):
        if not 0 < seconds < math.inf:
            raise ConfigError(f"{flag} {seconds:g}; expected seconds above 0")
    if options.slurm_job_id is not None and not options.slurm_job_id.isdigit():
        raise ConfigError(f"--slurm-job-id {options.slurm_job_id!r}; expected a number")
    if options.slurm_setup_script and not options.slurm_setup_script.is_file():
        raise ConfigError(f"--slurm-setup-script {options.slurm_setup_script}: no such file")
    if (options.hosts or options.hosts_file) and options.slurm_mode:
        raise ConfigError("--hosts and --slurm-mode exclude each other")
    if options.hosts and options.hosts_file:
        raise ConfigError("--hosts and --hosts-file exclude each other")
    port = options.data_collector_port
    if port is not None and not 0 < port < 2**16:
        raise ConfigError(f"--data-collector-port {port}; expected 1 to 65535")
    registry.backend(options.backend, given_by="--backend")


def _named(words: Iterable[str]) -> tuple[Host, ...]:
    """Hosts of the command line, where ``node[01-04]`` stands for four."""
    try:
        names = [name for word in words for part in _parts(word) for name in expand(part)]
    except ValueError as error:
        raise ConfigError(f"--hosts: {error}") from error
    return _distinct(names, "--hosts")


def _parts(word: str) -> list[str]:
    """Hosts with commas between them, as mpirun takes them; a comma in a bracket is a range's."""
    return [word] if "[" in word else [part for part in word.split(",") if part]


def _listed(file: Path | None) -> tuple[Host, ...]:
    """A hostfile of the launcher, or a plain list: a host a line."""
    if file is None:
        return ()
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--hosts-file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--hosts-file {file}: not UTF-8 text") from error
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    if any("=" in line for line in lines):
        return parse_hostfile(text, file)
    return _distinct([line for line in lines if line], f"--hosts-file {file}")


def _distinct(names: list[str], source: str) -> tuple[Host, ...]:
    for name in names:
        # Such a name would be taken for an option further on.
        if not name or name.startswith("-") or any(c.isspace() for c in name):
            raise ConfigError(f"{source}: {name!r} is no host name")
        if names.count(name) > 1:
            raise ConfigError(f"{source}: host {name!r} is named twice")
    return tuple(Host(name) for name in names)
