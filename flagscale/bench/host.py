"""What the benchmark runs on each host that it reaches by SSH; its orders come on stdin.

``prepare`` answers with a free port, a directory for files and the addresses it knows; ``run`` is
a host's ranks; ``bring`` gives back what they have left there, as a tar file on stdout.
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

from flagscale.bench.rank import Job
from flagscale.bench.spawn import RankRange, cores_here, run_job
from flagscale.cli_errors import guard, nobody_reads
from flagscale.records import decode, encode

LOGS = "logs"
"""The directory of the ranks' output, in that of the run."""
# A host may hear some time after the others that the command has gone away.
_NOTICE_SECONDS = 3.0


@dataclass(frozen=True)
class PreparedHost:
    """What a host offers."""

    port: int
    """Free at this moment."""
    scratch: str
    """A new directory for the files of this run."""
    machine: str = ""
    """What the host calls itself."""
    cores: int = 1
    known: dict[str, bool] = field(default_factory=dict)
    """The addresses it was asked about and can resolve: whether to more than itself."""


@dataclass(frozen=True)
class Order:
    """What a host shall run."""

    job: Job
    count: int
    ranks: RankRange
    environment: dict[str, str]
    directory: str
    """Where to run, if there is such a directory on the host."""
    scratch: str
    files: tuple[str, ...]
    """What the ranks may write, in the directory of the run."""
    logs: bool = False


def prepare(addresses: Sequence[str] = ()) -> PreparedHost:
    """A free port of this host and a directory that is its owner's alone; which of ``addresses``
    it knows."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    known = look_up(addresses)
    scratch = tempfile.mkdtemp(prefix="flagscale-bench-")
    return PreparedHost(port, scratch, socket.gethostname(), cores_here(), known)


def look_up(addresses: Sequence[str]) -> dict[str, bool]:
    """Which of ``addresses`` this host can resolve, and whether to more than itself."""
    known: dict[str, bool] = {}
    for address in addresses:
        try:
            found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue
        numbers = [str(place[4][0]).partition("%")[0] for place in found]
        known[address] = not all(ipaddress.ip_address(number).is_loopback for number in numbers)
    return known


def run(order: Order) -> int:
    """The ranks of this host; the exit code."""
    os.environ.update(order.environment)
    scratch = Path(order.scratch)
    os.chdir(order.directory if Path(order.directory).is_dir() else scratch)
    for name in order.files:
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
    code, log_dir = 1, scratch / LOGS if order.logs else None
    try:
        code = run_job(order.job, order.count, log_dir=log_dir, ranks=order.ranks)
    finally:
        # Also where a line of a rank could not be passed on: nobody reads any more.
        if _abandoned(code):
            shutil.rmtree(scratch, ignore_errors=True)
    return code


def _abandoned(code: int) -> bool:
    """Whether nobody is left to fetch the files and clean up. Ranks that failed may have done so
    because those of another host were ended first, for a command that has just gone away."""
    deadline = time.monotonic() + (_NOTICE_SECONDS if code else 0.0)
    while not nobody_reads(sys.stdout):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def bring(scratch: Path) -> None:
    """Write all that is in the directory of a run to stdout, and remove it."""
    try:
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
            archive.add(scratch, arcname=".")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(words: list[str]) -> int:
    """``prepare ADDRESS ...``, ``run`` or ``bring DIRECTORY``; the exit code."""
    if words[:1] == ["prepare"]:
        print(encode(prepare(words[1:])))
        return 0
    if words == ["run"]:
        return run(decode(Order, sys.stdin.buffer.read()))
    if len(words) == 2 and words[0] == "bring":
        bring(Path(words[1]))
        return 0
    usage = "prepare ADDRESS ...|run|bring DIRECTORY"
    print(f"usage: python -m flagscale.bench.host {usage}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(guard(lambda: main(sys.argv[1:])))
