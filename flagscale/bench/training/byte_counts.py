"""Bytes that ranks send to each other: the evidence that two arms (:mod:`.arms`) communicate
differently.

fsccl counts the bytes that it sends to each rank. For other backends the kernel is queried: it
counts the bytes written to each TCP connection of this process, and the ranks' connections are
matched by their local and remote addresses.
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

import numpy as np

ConnectionBytes = Mapping[str, int]
"""Bytes sent on each connection. A key has the local and the peer's address and port, such as
``10.0.0.1 4711>10.0.0.2 5000``."""

ByteMatrix = tuple[tuple[int, ...], ...]
"""Bytes, [from rank][to rank]."""

RING_TOPOLOGY = "a ring: every rank to one other"
_MIN_GRADIENT_FRACTION = 0.1
"""Smallest plausible ratio of counted bytes to the bytes of reduced gradients."""
# Offsets in the kernel's ``struct tcp_info``: of ``tcpi_notsent_bytes``, and of ``tcpi_bytes_sent``
# and ``tcpi_bytes_retrans``, which it has since Linux 4.19.
_NOT_SENT_OFFSET, _BYTES_SENT_OFFSET = 144, 200
_TCP_INFO_SIZE = 256
_ALGORITHM_LINE = re.compile(
    r"(?P<operation>\w+): \d+ Bytes -> Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)",
    re.IGNORECASE,
)
# Some versions of NCCL log the number of an algorithm instead of its name (NCCL_ALGO_TREE is 0,
# NCCL_ALGO_RING 1).
_NCCL_ALGORITHMS = {"0": "TREE", "1": "RING"}


def connection_bytes() -> dict[str, int]:
    """Return the bytes that this process has written to each of its TCP connections.

    These are the bytes that the kernel has sent, without retransmissions, and those still queued
    in it. Acknowledged bytes would lag behind.
    """
    counts: dict[str, int] = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError, struct.error):
            if not str(descriptor.readlink()).startswith("socket:"):
                continue
            with closing(socket.socket(fileno=os.dup(int(descriptor.name)))) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
                (queued,) = struct.unpack_from("=I", info, _NOT_SENT_OFFSET)
                sent, retransmitted = struct.unpack_from("=QQ", info, _BYTES_SENT_OFFSET)
                endpoints = (
                    f"{_format_endpoint(sock.getsockname())}>{_format_endpoint(sock.getpeername())}"
                )
                counts[endpoints] = sent - retransmitted + queued
    return counts


def _format_endpoint(address: Sequence[Any]) -> str:
    return f"{str(address[0]).removeprefix('::ffff:').partition('%')[0]} {address[1]}"


def count_growth(before: ConnectionBytes, after: ConnectionBytes) -> dict[str, int]:
    """Return the bytes sent on each connection between two calls of :func:`connection_bytes`."""
    return {key: count - before.get(key, 0) for key, count in after.items()}


def matrix_from_connections(ranks: Sequence[ConnectionBytes]) -> ByteMatrix:
    """Return the bytes from rank to rank for each rank's connections. Connections whose peer is not
    a rank are left out: they lead to a store."""
    rank_by_endpoint = {
        key.partition(">")[0]: rank for rank, counts in enumerate(ranks) for key in counts
    }
    matrix = [[0] * len(ranks) for _ in ranks]
    for rank, counts in enumerate(ranks):
        for key, count in counts.items():
            peer = rank_by_endpoint.get(key.partition(">")[2])
            if peer is not None and peer != rank:
                matrix[rank][peer] += count
    return tuple(map(tuple, matrix))


def matrix_from_counts(ranks: Sequence[Mapping[str, int]]) -> ByteMatrix:
    """Return the bytes from rank to rank for each rank's own counts by destination rank."""
    ranks_range = range(len(ranks))
    return tuple(tuple(counts.get(str(target), 0) for target in ranks_range) for counts in ranks)


def add_matrices(first: ByteMatrix, second: ByteMatrix) -> ByteMatrix:
    """Return the sum of two matrices of the same ranks."""
    rows = zip(first, second, strict=True)
    return tuple(tuple(map(sum, zip(*row, strict=True))) for row in rows)


def covers_gradients(sent: ByteMatrix, gradient_bytes: int) -> bool:
    """Return whether the total of ``sent`` is plausible for all_reduces of ``gradient_bytes``.

    Any all_reduce sends each byte at least once. If the total is below a tenth of that, the
    gradients were sent by other means that are not counted.
    """
    return sum(map(sum, sent)) > _MIN_GRADIENT_FRACTION * gradient_bytes


def matrix_difference(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> float:
    """Return the fraction of bytes (0 to 1) that are sent between different pairs of ranks in the
    two matrices: half the sum of absolute differences between the normalized matrices.
    """
    first_matrix, second_matrix = (np.asarray(matrix, dtype=float) for matrix in (first, second))
    if not first_matrix.sum() or not second_matrix.sum():
        return 0.0 if first_matrix.sum() == second_matrix.sum() else 1.0
    return float(
        np.abs(first_matrix / first_matrix.sum() - second_matrix / second_matrix.sum()).sum() / 2
    )


def describe_matrix(sent: Sequence[Sequence[int]]) -> str:
    """Describe the topology of a matrix [from][to], such as ``every rank to every other``. A pair
    of ranks is an edge if its entry is above a twentieth of the largest one.
    """
    rank_count = len(sent)
    largest = max((cell for row in sent for cell in row), default=0)
    edges = {
        (a, b)
        for a, row in enumerate(sent)
        for b, cell in enumerate(row)
        if cell > largest / 20 > 0
    }
    if not edges:
        return "nothing was sent"
    if rank_count == 2:
        return "two ranks, to each other"
    if any(
        edges == {(r, (r + k) % rank_count) for r in range(rank_count)}
        for k in range(1, rank_count)
    ):
        return RING_TOPOLOGY
    if len(edges) == rank_count * (rank_count - 1):
        return "every rank to every other"
    pairs = {frozenset(edge) for edge in edges}
    if len(pairs) == rank_count - 1 and len(edges) == 2 * (rank_count - 1):
        return f"a tree: {rank_count - 1} pairs, both ways"
    return f"{len(edges)} of {rank_count * (rank_count - 1)} directions"


def count_nccl_algorithms(lines: Iterable[str]) -> dict[str, int]:
    """Return how many all_reduces used each algorithm, from the lines of NCCL's log
    (``NCCL_DEBUG_SUBSYS=TUNING``)."""
    counts: Counter[str] = Counter()
    for line in lines:
        match = _ALGORITHM_LINE.search(line)
        if match is not None and match["operation"].lower() == "allreduce":
            algorithm = match["algorithm"].upper()
            counts[_NCCL_ALGORITHMS.get(algorithm, algorithm)] += 1
    return dict(counts)


def read_nccl_log(path: Path) -> dict[str, int]:
    """Return :func:`count_nccl_algorithms` of a log file; empty if there is none."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        return count_nccl_algorithms(lines)
