"""Compatibility flags of ``flagscale bench traffic``: those of ``run_background.sh``.

Published guides use that script. It starts half of ``SIZE`` processes on each of two hosts, which
exchange 8 MB in a ring for ``TIME`` seconds; the resulting tail latency is not measured. Here all
hosts are started from one machine, and the tail is measured. Each flag is accepted with a note on
its meaning here.
"""

from __future__ import annotations

import argparse
import socket

from flagscale.errors import ConfigError

DEFAULT_PORT = 12355
_TAIL_BY_SIZE = {4: "1.5", 16: "3"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the script's flags."""
    add = parser.add_argument_group("as run_background.sh knows them").add_argument
    add("-s", dest="guide_size", type=int, metavar="SIZE", help="total number of flows")
    add("-r", dest="guide_rank", type=int, metavar="RANK", help="0 or 1; ignored")
    add("-t", dest="guide_time", type=float, metavar="SECONDS", help="same as --seconds")
    add("-m", dest="guide_master", metavar="ADDRESS", help="first host")
    add("-p", dest="guide_port", type=int, metavar="PORT", help="same as --port")
    add("-d", dest="guide_device", metavar="NAME", help="same as --interface")


def translate(options: argparse.Namespace) -> list[str]:
    """Convert the script's flags into this command's options, in place.

    Returns:
        A note on each flag.

    Raises:
        ConfigError: a value is wrong, or the second host cannot be determined.
    """
    notes: list[str] = []
    options.guide_flows = _flow_count(options, notes)
    if options.guide_rank is not None:
        notes.append(f"-r {options.guide_rank}: every host is started from here; run this once")
    if options.guide_time is not None:
        options.seconds = options.guide_time
        notes.append(f"-t {options.guide_time:g}: --seconds, for all flows")
    if options.guide_master is not None:
        _set_hosts(options, notes)
    if options.guide_port is not None:
        options.port = options.guide_port
        notes.append(f"-p {options.guide_port}: --port, where each host receives flows")
    if options.guide_device is not None:
        options.interface = options.guide_device
        notes.append(f"-d {options.guide_device}: --interface, by which flows and probe leave")
    return notes


def _flow_count(options: argparse.Namespace, notes: list[str]) -> int:
    size: int | None = options.guide_size
    if size is None:
        return 0
    if not 2 <= size <= 1024:
        raise ConfigError(f"-s {size}; expected 2 to 1024 processes")
    tail = _TAIL_BY_SIZE.get(size)
    tail_note = f"; the guide means a tail of {tail}, which --tail {tail} finds" if tail else ""
    notes.append(f"-s {size}: {size} flows in all, as many each way{tail_note}")
    return size


def _set_hosts(options: argparse.Namespace, notes: list[str]) -> None:
    """Set the two hosts: ``-m`` and this machine. The script is run on both hosts, and names the
    first one on each.
    """
    master = options.guide_master
    if options.hosts or options.hosts_file or options.replay:
        if master not in options.hosts:
            notes.append(f"-m {master}: has no effect with named hosts")
        return
    local_address = _local_address(master)
    if local_address == master:
        raise ConfigError(
            f"-m {master} is this machine: which is the other host?",
            hint=f"--hosts {master} OTHER, and run this once",
        )
    options.hosts = [master, local_address]
    notes.append(f"-m {master}: --hosts {master} {local_address}, the second being this machine")


def _local_address(master: str) -> str:
    """Return the address from which this machine reaches ``master``. Nothing is sent."""
    try:
        family, _, _, _, remote_end = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(remote_end)
            local_end = str(probe.getsockname()[0])
            return master if local_end == remote_end[0] else local_end
    except OSError as error:
        raise ConfigError(f"-m {master}: {error.strerror or error}") from error
