"""nccl-tests' definitions of sizes and bandwidths, written independently of the benchmark's own.

Sources: each test's ``*GetCollByteCount`` and ``*GetBw``, and PERFORMANCE.md. A size is that of
the larger of a rank's two buffers. ``count`` is the argument of one call: for all-gather,
reduce-scatter, all-to-all, gather and scatter it is a rank's part.
"""

from __future__ import annotations

from dataclasses import dataclass

from flagscale.errors import ConfigError

_SHARDED_OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


@dataclass(frozen=True)
class ElementCounts:
    """Elements of one call and of a rank's buffers."""

    count: int
    send: int
    receive: int


def count_elements(operation: str, ranks: int, size: int, element_bytes: int) -> ElementCounts:
    """Return a rank's counts for ``size`` bytes, in elements of ``element_bytes`` bytes.

    Raises:
        ConfigError: nccl-tests has no such test.
    """
    _require_test(operation)
    total = size // element_bytes
    shard = total // ranks
    if operation in ("all_gather", "gather"):
        return ElementCounts(shard, shard, shard * ranks)
    if operation in ("reduce_scatter", "scatter"):
        return ElementCounts(shard, shard * ranks, shard)
    if operation == "all_to_all":
        return ElementCounts(shard, shard * ranks, shard * ranks)
    return ElementCounts(total, total, total)


def compute_bandwidths(
    operation: str, ranks: int, count: int, element_bytes: int, seconds: float
) -> tuple[float, float]:
    """Return algbw and busbw in 1e9 bytes per second for calls with ``count`` that took
    ``seconds``.
    """
    _require_test(operation)
    shards = ranks if operation in _SHARDED_OPERATIONS else 1
    algbw = count * shards * element_bytes / 1e9 / seconds
    if operation == "all_reduce":
        return algbw, algbw * (2 * (ranks - 1)) / ranks
    return algbw, algbw * (ranks - 1) / ranks if operation in _SHARDED_OPERATIONS else algbw


OPERATIONS = ("all_reduce", *_SHARDED_OPERATIONS, "broadcast", "reduce", "sendrecv")
"""Operations that nccl-tests has a test for, by this project's names."""


def _require_test(operation: str) -> None:
    if operation not in OPERATIONS:
        raise ConfigError(f"nccl-tests has no test of {operation}; it has {', '.join(OPERATIONS)}")
