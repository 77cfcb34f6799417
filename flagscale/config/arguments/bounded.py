"""Sums of gradients in bounded time (``comm: {tail: bounded}``), and what would leave them exact.

Pure, and free of torch; see :mod:`flagscale.config.arguments.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator

from flagscale.config.arguments.precision import Broken, Values

OPTION = "tail=bounded"
VARIABLE = ("FSCCL_TAIL", "bounded")
"""The same from ``experiment.envs``."""


def broken(values: Values) -> Iterator[Broken]:
    """What is asked for can be had: it is all_reduces that are bounded."""
    if OPTION in (values["comm"] or ()) and "fsccl" in values["distributed_backend"]:
        yield from exact_anyway(values, "comm: {tail: bounded}")


def exact_anyway(values: Values, given: str) -> Iterator[Broken]:
    """Arguments by which gradients would be summed exactly although bounded sums are asked for.

    ``given`` is what asks for them, as the user wrote it.
    """
    if values["use_distributed_optimizer"]:
        yield (
            "use_distributed_optimizer",
            f"true with {given}: it sums gradients by reduce_scatter, which is exact, so nothing "
            "would be bounded; set it to false, or leave out the other",
        )
