"""Who sends how many bytes to whom: the proof that two arms are two.

fsccl counts for itself. Of other backends the kernel is asked: each TCP connection of this process
knows what was written to it, and ranks find each other's by the addresses of its ends.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

End = str
"""An address and port, as ``10.0.0.1 4711``."""
Connections = Mapping[str, int]
"""Bytes sent on each connection: its own end and the peer's, with a ``>`` between."""

Table = tuple[tuple[int, ...], ...]
"""Bytes, [from rank][to rank]."""

_LEAST = 0.1
# Where they lie in the kernel's ``struct tcp_info``, which has the last two since Linux 4.19.
_NOT_SENT, _SENT = 144, 200
_LONGEST = 256
_CHOSEN = re.compile(
    r"(?P<what>\w+): \d+ Bytes -> Algo (?P<algo>\w+) proto (?P<proto>\w+)", re.IGNORECASE
)
_NCCL_ALGORITHMS = {"0": "TREE", "1": "RING"}


def connections() -> dict[str, int]:
    """What this process has written to each of its TCP connections, bytes: what the kernel sent,
    once each, and what still waits in it. What was acknowledged lags behind that."""
    found: dict[str, int] = {}
    for name in Path("/proc/self/fd").iterdir():
        with suppress(OSError, struct.error):
            if not str(name.readlink()).startswith("socket:"):
                continue
            with closing(socket.socket(fileno=os.dup(int(name.name)))) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LONGEST)
                (waiting,) = struct.unpack_from("=I", info, _NOT_SENT)
                sent, again = struct.unpack_from("=QQ", info, _SENT)
                ends = f"{_end(one.getsockname())}>{_end(one.getpeername())}"
                found[ends] = sent - again + waiting
    return found


def _end(address: Sequence[Any]) -> End:
    return f"{str(address[0]).removeprefix('::ffff:').partition('%')[0]} {address[1]}"


def grown(before: Connections, after: Connections) -> dict[str, int]:
    """What was sent on each connection between two looks at them."""
    return {key: count - before.get(key, 0) for key, count in after.items()}


def matrix(of_each: Sequence[Connections]) -> Table:
    """Bytes from rank to rank, of what each rank has sent on each of its connections. Those whose
    other end is no rank's are left out: they lead to a store."""
    owner = {key.partition(">")[0]: rank for rank, own in enumerate(of_each) for key in own}
    table = [[0] * len(of_each) for _ in of_each]
    for rank, own in enumerate(of_each):
        for key, count in own.items():
            other = owner.get(key.partition(">")[2])
            if other is not None and other != rank:
                table[rank][other] += count
    return tuple(map(tuple, table))


def between(by_rank: Sequence[Mapping[str, int]]) -> Table:
    """Bytes from rank to rank, of what each rank has counted by rank."""
    size = range(len(by_rank))
    return tuple(tuple(counts.get(str(to), 0) for to in size) for counts in by_rank)


def added(one: Table, other: Table) -> Table:
    """Two tables of the same ranks in one."""
    rows = zip(one, other, strict=True)
    return tuple(tuple(map(sum, zip(*row, strict=True))) for row in rows)


def seen(sent: Table, gradients: int) -> bool:
    """Whether a table has the bytes of sums of so many bytes of gradients. Any all_reduce sends
    each at least once: what is far below is the talk beside it, of which nothing can be told."""
    return sum(map(sum, sent)) > _LEAST * gradients


def chosen_by_nccl(lines: Iterable[str]) -> dict[str, int]:
    """The algorithms that NCCL's log (``NCCL_DEBUG_SUBSYS=TUNING``) says its all_reduces took."""
    found: Counter[str] = Counter()
    for line in lines:
        match = _CHOSEN.search(line)
        if match is not None and match["what"].lower() == "allreduce":
            algorithm = match["algo"].upper()
            found[_NCCL_ALGORITHMS.get(algorithm, algorithm)] += 1
    return dict(found)


def read_nccl(path: Path) -> dict[str, int]:
    """The same of a log on disk; nothing where there is none."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        return chosen_by_nccl(lines)
