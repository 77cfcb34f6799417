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
from flagscale.hosts.workers.task import WorkerTask
from flagscale.records import encode

LOGS = "logs"
"""Subdirectory for the ranks' output."""
# A host may notice some time after the others that the command has gone away.
_NOTICE_SECONDS = 3.0


@dataclass(frozen=True)
class Addresses:
    """Addresses that a host is asked to resolve: candidates for the rendezvous."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class PreparedHost:
    """Answer of :func:`prepare`."""

    port: int
    """Free at this moment."""
    scratch: str
    """New directory for the files of this run, readable by its owner alone."""
    machine: str = ""
    """Host name as the host itself has it."""
    cores: int = 1
    known: dict[str, bool] = field(default_factory=dict)
    """Addresses the host can resolve; False: to itself (loopback) alone."""


@dataclass(frozen=True)
class HostTask:
    """The ranks of one host."""

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
    """The directory of a run on a host."""

    path: str


def prepare(asked: Addresses) -> int:
    """Print a :class:`PreparedHost` as JSON."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    resolved = resolve_addresses(asked.addresses)
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
        numbers = [str(entry[4][0]).partition("%")[0] for entry in resolved]
        resolvable[address] = not all(
            ipaddress.ip_address(number).is_loopback for number in numbers
        )
    return resolvable


def run_ranks(order: HostTask) -> int:
    """Run the ranks of this host and return their exit code."""
    os.environ.update(order.environment)
    scratch = Path(order.scratch)
    os.chdir(order.directory if Path(order.directory).is_dir() else scratch)
    for name in order.files:
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
    code, log_dir = 1, scratch / LOGS if order.logs else None
    try:
        code = run_local_task(order.task, order.count, log_dir=log_dir, ranks=order.ranks)
    finally:
        # Also if a line of a rank could not be forwarded: nobody reads any more.
        if _is_abandoned(code):
            shutil.rmtree(scratch, ignore_errors=True)
    return code


def _is_abandoned(code: int) -> bool:
    """Return whether nobody is left to fetch the files and clean up.

    Ranks may have failed because those of another host were ended first, by a command that has
    just gone away: after a failure the check is repeated for a while.
    """
    deadline = time.monotonic() + (_NOTICE_SECONDS if code else 0.0)
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
