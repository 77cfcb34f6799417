"""nccl-tests' definitions, written down a second time: what the benchmark must agree with.

Nothing of the benchmark is used here. Sources: each test's ``*GetCollByteCount`` and ``*GetBw``,
and PERFORMANCE.md. A size is that of the larger of a rank's two buffers; ``count`` is what one
call is told: of all-gather, reduce-scatter, all-to-all, gather and scatter a rank's part.
"""

from __future__ import annotations

from dataclasses import dataclass

from flagscale.errors import ConfigError

_CUT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


@dataclass(frozen=True)
class Counts:
    """Elements of one call and of a rank's buffers."""

    count: int
    send: int
    receive: int


def counts(operation: str, ranks: int, size: int, element: int) -> Counts:
    """What a rank passes for a size of ``size`` bytes, in elements of ``element`` bytes.

    Raises:
        ConfigError: nccl-tests has no such test.
    """
    _require(operation)
    whole = size // element
    part = whole // ranks
    if operation in ("all_gather", "gather"):
        return Counts(part, part, part * ranks)
    if operation in ("reduce_scatter", "scatter"):
        return Counts(part, part * ranks, part)
    if operation == "all_to_all":
        return Counts(part, part * ranks, part * ranks)
    return Counts(whole, whole, whole)


def bandwidths(
    operation: str, ranks: int, count: int, element: int, seconds: float
) -> tuple[float, float]:
    """algbw and busbw, in 1e9 bytes a second, of calls with ``count`` that took ``seconds``."""
    _require(operation)
    parts = ranks if operation in _CUT else 1
    algbw = count * parts * element / 1e9 / seconds
    if operation == "all_reduce":
        return algbw, algbw * (2 * (ranks - 1)) / ranks
    return algbw, algbw * (ranks - 1) / ranks if operation in _CUT else algbw


OPERATIONS = ("all_reduce", *_CUT, "broadcast", "reduce", "sendrecv")
"""What nccl-tests has a test for, by our names."""


def _require(operation: str) -> None:
    if operation not in OPERATIONS:
        raise ConfigError(f"nccl-tests has no test of {operation}; it has {', '.join(OPERATIONS)}")
