"""What the benchmark runs on each host that it reaches by SSH; its orders come on stdin.

``prepare`` answers with a free port, a directory for files and the addresses it knows; ``run`` is
a host's ranks.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flagscale.bench.spawn import Share, spawn, unheard
from flagscale.guard import guard

# A host may hear some time after the others that the command has gone away.
_NOTICE_SECONDS = 3.0


@dataclass(frozen=True)
class Prepared:
    """What a host offers."""

    port: int
    """Free at this moment."""
    scratch: str
    """A new directory for the files of this run."""
    machine: str = ""
    """What the host calls itself."""
    known: dict[str, bool] = field(default_factory=dict)
    """The addresses it was asked about and can resolve: whether to more than itself."""


@dataclass(frozen=True)
class Order:
    """What a host shall run."""

    command: tuple[str, ...]
    """What follows the interpreter."""
    count: int
    share: Share
    environment: dict[str, str]
    directory: str
    """Where to run, if there is such a directory on the host."""
    scratch: str
    log_dir: str | None = None

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: bytes) -> Order:
        """The reverse of :meth:`encode`."""
        given = json.loads(text)
        share = Share(**given.pop("share"))
        return cls(share=share, command=tuple(given.pop("command")), **given)


def prepare(addresses: Sequence[str] = ()) -> Prepared:
    """A free port of this host and a directory that is its owner's alone; which of ``addresses``
    it knows."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    known = look_up(addresses)
    scratch = tempfile.mkdtemp(prefix="flagscale-bench-")
    return Prepared(port, scratch, socket.gethostname(), known)


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
    os.chdir(order.directory if Path(order.directory).is_dir() else order.scratch)
    log_dir = None if order.log_dir is None else Path(order.log_dir)
    command = [sys.executable, *order.command]
    code = 1
    try:
        code = spawn(command, order.count, log_dir=log_dir, share=order.share)
    finally:
        # Also where a line of a rank could not be passed on: nobody reads any more.
        if _abandoned(code):
            shutil.rmtree(order.scratch, ignore_errors=True)
    return code


def _abandoned(code: int) -> bool:
    """Whether nobody is left to fetch the files and clean up. Ranks that failed may have done so
    because those of another host were ended first, for a command that has just gone away."""
    deadline = time.monotonic() + (_NOTICE_SECONDS if code else 0.0)
    while not unheard():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def main(words: list[str]) -> int:
    """``prepare ADDRESS ...``, ``run`` or ``clean DIRECTORY``; the exit code."""
    if words[:1] == ["prepare"]:
        print(json.dumps(asdict(prepare(words[1:]))))
        return 0
    if words == ["run"]:
        return run(Order.decode(sys.stdin.buffer.read()))
    if len(words) == 2 and words[0] == "clean":
        shutil.rmtree(words[1], ignore_errors=True)
        return 0
    usage = "prepare ADDRESS ...|run|clean DIRECTORY"
    print(f"usage: python -m flagscale.bench.host {usage}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(guard(lambda: main(sys.argv[1:])))
