"""Bounded all_reduce of gradients (``comm: {tail: bounded}``).

fsccl can bound the tail latency of an all_reduce, the time of its slowest operations, by excluding
data that arrives late. This module selects the process groups in which it does so, reports how much
data was excluded or lost, and decides whether to skip a step.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from flagscale.accelerators.device import current_device

GRADIENT_GROUP_PATTERN = "*DATA_PARALLEL_GROUP*"
"""Glob pattern for megatron.core's descriptions of the groups that reduce gradients."""
_NO_GROUP_PATTERN = "none"


def bound_gradient_groups_only(*, is_hybrid: bool) -> None:
    """Restrict bounded all_reduce to groups that reduce gradients.

    It applies to groups created after the call. With ``is_hybrid`` no group is bounded: gradients
    of a sharded optimizer are summed exactly, between the replicas of its shards as well.

    If the user has set ``FSCCL_TAIL_GROUPS``, the user's groups are used instead.
    """
    pattern = _NO_GROUP_PATTERN if is_hybrid else GRADIENT_GROUP_PATTERN
    os.environ.setdefault("FSCCL_TAIL_GROUPS", pattern)


def explain_unbounded_reduce(args: argparse.Namespace) -> str | None:
    """Return a warning if a requested bounded all_reduce has no effect, or None.

    This is the case if gradients are reduced by reduce_scatter. The launcher rejects the
    combination in a YAML file. An environment variable set in a shell is visible to ranks only.
    """
    requested = os.environ.get("FSCCL_TAIL") == "bounded" and "fsccl" in args.distributed_backend
    if not requested or not args.use_distributed_optimizer:
        return None
    return (
        "FSCCL_TAIL=bounded has no effect: gradients are summed exactly, by reduce_scatter, as "
        "use_distributed_optimizer does"
    )


class BoundedReduceStatistics:
    """Statistics of bounded all_reduce over the gradient groups, between two calls of
    :meth:`pop_statistics`.

    Other backends than fsccl provide no statistics.
    """

    def __init__(self) -> None:
        self._backends = _get_gradient_backends()
        self._previous: Counter[str] = Counter()

    def pop_statistics(self) -> dict[str, float | int]:
        """Return the statistics since the last call, which differ between ranks.

        ``tail_excluded`` and ``tail_lost`` are the fractions (0 to 1) of excluded blocks of data
        and of lost packets, ``tail_seconds`` the total duration, and ``tail_mib`` the MiB sent by
        this rank including retransmissions. ``tail_repeated`` counts operations that were repeated
        without exclusion, and ``tail_skipped`` those skipped together with their step. Empty if no
        operation was bounded.
        """
        totals: Counter[str] = Counter()
        for backend in self._backends:
            totals.update(backend.tail_statistics())
        previous, self._previous = self._previous, totals
        delta = {name: count - previous[name] for name, count in totals.items()}
        if not delta.get("operations"):
            return {}
        return {
            "tail_excluded": delta["excluded"] / max(delta["pieces"], 1),
            "tail_lost": delta["lost"] / max(delta["packets"], 1),
            "tail_seconds": delta["seconds"],
            "tail_mib": delta["sent_bytes"] / 2**20,
            "tail_repeated": int(delta["repeated"]),
            "tail_skipped": int(delta["skipped"]),
        }


class SkippedReduceDetector:
    """Detects steps whose gradients must be discarded.

    With ``tail_above: skip``, an all_reduce that lost too much is skipped. The whole step is then
    skipped on all ranks.
    """

    def __init__(self) -> None:
        bounded = os.environ.get("FSCCL_TAIL") == "bounded"
        self._enabled = bounded and os.environ.get("FSCCL_TAIL_ABOVE") == "skip"
        self._backends = _get_gradient_backends() if self._enabled else []
        self._previous_skipped = 0.0

    def pop_skipped(self) -> bool:
        """Return whether any rank skipped an all_reduce since the last call.

        Collective: all ranks call it and get the same result.
        """
        if not self._enabled:
            return False
        skipped = sum(backend.tail_statistics().get("skipped", 0.0) for backend in self._backends)
        newly_skipped, self._previous_skipped = skipped - self._previous_skipped, skipped
        max_skipped = torch.tensor(newly_skipped, device=current_device().torch_device)
        dist.all_reduce(max_skipped, dist.ReduceOp.MAX)
        return bool(max_skipped > 0)


def _get_gradient_backends() -> list[Any]:
    """Return this rank's backends of the gradient groups that provide bounded all_reduce."""
    backends = [group._get_backend(current_device().torch_device) for group in _gradient_groups()]
    return [backend for backend in backends if hasattr(backend, "tail_statistics")]


def _gradient_groups() -> list[Any]:
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group(check_initialized=False)
    return [dense] if experts in (None, dense) else [dense, experts]
