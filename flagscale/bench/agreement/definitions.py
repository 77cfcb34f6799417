"""nccl-tests' definitions, written independently of the benchmark, which must agree with them.

Sources: each test's ``*GetCollByteCount`` and ``*GetBw``, and PERFORMANCE.md. A size is that of
the larger of a rank's two buffers. ``count`` is the argument of one call: for all-gather,
reduce-scatter, all-to-all, gather and scatter it is a rank's part.
"""

from __future__ import annotations

from dataclasses import dataclass

from flagscale.errors import ConfigError

_DIVIDED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


@dataclass(frozen=True)
class ElementCounts:
    """Elements of one call and of a rank's buffers."""

    count: int
    send: int
    receive: int


def count_elements(operation: str, ranks: int, size: int, element: int) -> ElementCounts:
    """Return a rank's counts for ``size`` bytes, in elements of ``element`` bytes.

    Raises:
        ConfigError: nccl-tests has no such test.
    """
    _require_test(operation)
    whole = size // element
    part = whole // ranks
    if operation in ("all_gather", "gather"):
        return ElementCounts(part, part, part * ranks)
    if operation in ("reduce_scatter", "scatter"):
        return ElementCounts(part, part * ranks, part)
    if operation == "all_to_all":
        return ElementCounts(part, part * ranks, part * ranks)
    return ElementCounts(whole, whole, whole)


def compute_bandwidths(
    operation: str, ranks: int, count: int, element: int, seconds: float
) -> tuple[float, float]:
    """Return algbw and busbw in 1e9 bytes per second for calls with ``count`` that took
    ``seconds``.
    """
    _require_test(operation)
    parts = ranks if operation in _DIVIDED else 1
    algbw = count * parts * element / 1e9 / seconds
    if operation == "all_reduce":
        return algbw, algbw * (2 * (ranks - 1)) / ranks
    return algbw, algbw * (ranks - 1) / ranks if operation in _DIVIDED else algbw


OPERATIONS = ("all_reduce", *_DIVIDED, "broadcast", "reduce", "sendrecv")
"""Operations that nccl-tests has a test for, by this project's names."""


def _require_test(operation: str) -> None:
    if operation not in OPERATIONS:
        raise ConfigError(f"nccl-tests has no test of {operation}; it has {', '.join(OPERATIONS)}")
