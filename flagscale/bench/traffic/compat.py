"""The words of ``run_background.sh``, which published guides use: known, and told what each became.

That script starts half of ``SIZE`` processes on each of two hosts, which exchange 8 MB by a ring
for ``TIME`` seconds; whether a tail comes of it is left to the reader. Here all hosts are started
from one place, and the tail is measured.
"""

from __future__ import annotations

import argparse
import socket

from flagscale.errors import ConfigError

PORT = 12355
_TAILS = {4: "1.5", 16: "3"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The script's flags."""
    add = parser.add_argument_group("as run_background.sh knows them").add_argument
    add("-s", dest="guide_size", type=int, metavar="SIZE", help="so many flows in all")
    add("-r", dest="guide_rank", type=int, metavar="RANK", help="0 or 1: of no effect here")
    add("-t", dest="guide_time", type=float, metavar="SECONDS", help="--seconds")
    add("-m", dest="guide_master", metavar="ADDRESS", help="the first of the hosts")
    add("-p", dest="guide_port", type=int, metavar="PORT", help="--port")
    add("-d", dest="guide_device", metavar="NAME", help="--interface")


def translate(options: argparse.Namespace) -> list[str]:
    """Turn the script's flags into ours, in place; a sentence of what became of each.

    Raises:
        ConfigError: one of them has a wrong value, or the other host cannot be told.
    """
    notes: list[str] = []
    options.guide_flows = _size(options, notes)
    if options.guide_rank is not None:
        notes.append(f"-r {options.guide_rank}: every host is started from here; run this once")
    if options.guide_time is not None:
        options.seconds = options.guide_time
        notes.append(f"-t {options.guide_time:g}: --seconds, for all flows")
    if options.guide_master is not None:
        _master(options, notes)
    if options.guide_port is not None:
        options.port = options.guide_port
        notes.append(f"-p {options.guide_port}: --port, where each host receives flows")
    if options.guide_device is not None:
        options.interface = options.guide_device
        notes.append(f"-d {options.guide_device}: --interface, by which flows and probe leave")
    return notes


def _size(options: argparse.Namespace, notes: list[str]) -> int:
    size: int | None = options.guide_size
    if size is None:
        return 0
    if not 2 <= size <= 1024:
        raise ConfigError(f"-s {size}; expected 2 to 1024 processes")
    tail = _TAILS.get(size)
    meant = f"; the guide means a tail of {tail}, which --tail {tail} finds" if tail else ""
    notes.append(f"-s {size}: {size} flows in all, as many each way{meant}")
    return size


def _master(options: argparse.Namespace, notes: list[str]) -> None:
    """The guide is run on two hosts, and each names the first one."""
    master = options.guide_master
    if options.hosts or options.hosts_file or options.replay:
        if master not in options.hosts:
            notes.append(f"-m {master}: of no effect beside hosts that are named")
        return
    own = _own_address(master)
    if own == master:
        raise ConfigError(
            f"-m {master} is this machine: which is the other host?",
            hint=f"--hosts {master} OTHER, and run this once",
        )
    options.hosts = [master, own]
    notes.append(f"-m {master}: --hosts {master} {own}, the second being this machine")


def _own_address(master: str) -> str:
    """This machine's address on the way to another; nothing is sent for that."""
    try:
        family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
            return master if own == address[0] else own
    except OSError as error:
        raise ConfigError(f"-m {master}: {error.strerror or error}") from error
