"""Sums of gradients in bounded time (``comm: {tail: bounded}``): over which groups, what they left
out, and whether a step is left out with it."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from flagscale.accelerators.device import current

GRADIENTS = "*DATA_PARALLEL_GROUP*"
"""How megatron.core describes the groups over which gradients are summed."""


def gradients_alone() -> None:
    """Have groups that are made from now on sum in bounded time only where they sum gradients.
    Groups that are named by hand (``FSCCL_TAIL_GROUPS``) stay."""
    os.environ.setdefault("FSCCL_TAIL_GROUPS", GRADIENTS)


def without_effect(args: argparse.Namespace) -> str | None:
    """Why gradients are summed exactly although these ranks were asked to bound their sums; None
    where they bound them, or were not asked. The launcher refuses what a YAML tells; what a shell
    has set, only ranks know."""
    asked = os.environ.get("FSCCL_TAIL") == "bounded" and "fsccl" in args.distributed_backend
    if not asked or not args.use_distributed_optimizer:
        return None
    return (
        "FSCCL_TAIL=bounded has no effect: gradients are summed exactly, by reduce_scatter, as "
        "use_distributed_optimizer does"
    )


class TailReadings:
    """Reads the counts of the groups over which gradients are summed, between two calls of
    :meth:`take`. Other backends have none."""

    def __init__(self) -> None:
        self._backends = _backends()
        self._before: Counter[str] = Counter()

    def take(self) -> dict[str, float | int]:
        """Of the sums since the last call: the shares of pieces that were left out and of packets
        that were lost (0 to 1), the seconds that they took and the MiB that this rank has sent
        for them, what was sent again included, how many sums were repeated exactly, and how many
        were left out, with their steps. Empty where none went in bounded time. Each rank has
        counts of its own."""
        now: Counter[str] = Counter()
        for backend in self._backends:
            now.update(backend.tail_statistics())
        before, self._before = self._before, now
        new = {name: count - before[name] for name, count in now.items()}
        if not new.get("operations"):
            return {}
        return {
            "tail_excluded": new["excluded"] / max(new["pieces"], 1),
            "tail_lost": new["lost"] / max(new["packets"], 1),
            "tail_seconds": new["seconds"],
            "tail_mib": new["sent_bytes"] / 2**20,
            "tail_repeated": int(new["repeated"]),
            "tail_skipped": int(new["skipped"]),
        }


class LeftOut:
    """Whether a step's gradients are to be thrown away: where sums of which too much is lost are
    left out (``tail_above: skip``), the whole step goes with them, on all ranks."""

    def __init__(self) -> None:
        bounded = os.environ.get("FSCCL_TAIL") == "bounded"
        self._wanted = bounded and os.environ.get("FSCCL_TAIL_ABOVE") == "skip"
        self._backends = _backends() if self._wanted else []
        self._before = 0.0

    def take(self) -> bool:
        """Whether any rank had a sum left out since the last call. All ranks call it."""
        if not self._wanted:
            return False
        now = sum(one.tail_statistics().get("skipped", 0.0) for one in self._backends)
        new, self._before = now - self._before, now
        seen = torch.tensor(new, device=current().torch_device)
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        return bool(seen > 0)


def _backends() -> list[Any]:
    backends = [group._get_backend(current().torch_device) for group in _groups()]
    return [one for one in backends if hasattr(one, "tail_statistics")]


def _groups() -> list[Any]:
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group(check_initialized=False)
    return [dense] if experts in (None, dense) else [dense, experts]
