"""Functions that the SSH starter runs on each host, as :class:`.WorkerTask`.

:func:`prepare` reports a free port, a directory for files and the addresses the host can resolve;
:func:`run_ranks` runs the host's ranks; :func:`send_files` sends the files they have written.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flagscale.bench.starters.local import RankRange, run_local_task
from flagscale.bench.world import usable_cores
from flagscale.cli_errors import has_no_reader
from flagscale.free_port import free_port
from flagscale.hosts.workers.task import WorkerTask
from flagscale.records import encode

LOGS = "logs"
"""Subdirectory for the ranks' output."""
# A host may detect later than the others that the command has ended.
_ABANDON_CHECK_SECONDS = 3.0


@dataclass(frozen=True)
class Addresses:
    """Argument of :func:`prepare`: candidate addresses for the rendezvous, to be resolved."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class PreparedHost:
    """Result of :func:`prepare`."""

    port: int
    """A port that is free at this moment."""
    scratch: str
    """New directory for the files of this run, readable by its owner alone."""
    machine: str = ""
    """The host's own host name."""
    cores: int = 1
    resolvable: dict[str, bool] = field(default_factory=dict)
    """Addresses that the host can resolve; False if it resolves them to loopback alone."""


@dataclass(frozen=True)
class HostTask:
    """Argument of :func:`run_ranks`: the ranks of one host."""

    task: WorkerTask
    count: int
    ranks: RankRange
    environment: dict[str, str]
    directory: str
    """Working directory, if the host has it."""
    scratch: str
    files: tuple[str, ...]
    """Files that the ranks may write, relative to ``scratch``."""
    logs: bool = False


@dataclass(frozen=True)
class Scratch:
    """Argument of :func:`send_files`: the directory of a run on a host."""

    path: str


def prepare(candidates: Addresses) -> int:
    """Print a :class:`PreparedHost` as JSON."""
    port, resolved = free_port(), resolve_addresses(candidates.addresses)
    scratch = tempfile.mkdtemp(prefix="flagscale-bench-")
    print(encode(PreparedHost(port, scratch, socket.gethostname(), usable_cores(), resolved)))
    return 0


def resolve_addresses(addresses: Sequence[str]) -> dict[str, bool]:
    """Return those of ``addresses`` that this host can resolve; False for loopback alone."""
    resolvable: dict[str, bool] = {}
    for address in addresses:
        try:
            resolved = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue
        ip_addresses = [str(entry[4][0]).partition("%")[0] for entry in resolved]
        resolvable[address] = not all(
            ipaddress.ip_address(ip_address).is_loopback for ip_address in ip_addresses
        )
    return resolvable


def run_ranks(host_task: HostTask) -> int:
    """Run the ranks of this host and return their exit code."""
    os.environ.update(host_task.environment)
    scratch = Path(host_task.scratch)
    os.chdir(host_task.directory if Path(host_task.directory).is_dir() else scratch)
    for name in host_task.files:
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
    code, log_dir = 1, scratch / LOGS if host_task.logs else None
    try:
        code = run_local_task(
            host_task.task, host_task.count, log_dir=log_dir, ranks=host_task.ranks
        )
    finally:
        # Also after an exception because a line of a rank could not be forwarded.
        if _is_abandoned(code):
            shutil.rmtree(scratch, ignore_errors=True)
    return code


def _is_abandoned(code: int) -> bool:
    """Return whether the command that would fetch the files and clean up has ended.

    If the command is killed, its hosts detect that at different times, and ranks may fail because
    those of another host were ended first. Therefore the check is repeated for some seconds after a
    failure (``code``).
    """
    deadline = time.monotonic() + (_ABANDON_CHECK_SECONDS if code else 0.0)
    while not has_no_reader(sys.stdout):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def send_files(scratch: Scratch) -> int:
    """Write the directory of a run to stdout as a tar file, and remove it."""
    try:
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
            archive.add(scratch.path, arcname=".")
    finally:
        shutil.rmtree(scratch.path, ignore_errors=True)
    return 0
