"""The routers' losses of a mixture of experts, for the log.

The gradient of these losses is added by megatron.core inside the routers; what they come to it
only sums up, layer by layer, in a table of the rank. Here the tables of all ranks become one
number a loss.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
)

from flagscale.estimate.arithmetic import further, mixtures

#: megatron.core's names for what its routers sum up.
NAMES = (
    "load_balancing_loss",
    "seq_load_balancing_loss",
    "global_load_balancing_loss",
    "z_loss",
)


class RouterLosses:
    """Collects the routers' losses between two calls of :meth:`take`."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self._layers = sum(mixtures(args)) + mixtures(args)[-1] * further(args)
        # Replicas with more of a step's sequences count more.
        self._each = None
        if args.shares is not None:
            self._each = args.share.size * len(args.shares) / args.global_batch_size
        self._device = device
        self._steps, self._passes = 0, 0

    def add(self, micro_batches: int) -> None:
        """A step is done, of so many micro-batches of this rank."""
        self._steps += 1
        self._passes += micro_batches

    def take(self) -> dict[str, float]:
        """Each loss the model has, before its coefficient: the mean over the micro-batches of all
        steps since the last call, over layers with experts and over ranks; with unlike replicas
        over sequences. Empty for a model without experts.

        A load-balancing loss is 1 where all experts get the same share of the tokens. Every rank
        has to call this; it waits for the device.
        """
        steps, passes, self._steps, self._passes = self._steps, self._passes, 0, 0
        if not self._layers or not steps:
            return {}
        each = 1.0 / passes if self._each is None else self._each / steps
        sums = torch.zeros(2, len(NAMES), dtype=torch.float64, device=self._device)
        for place, name in enumerate(NAMES):
            entry = get_moe_layer_wise_logging_tracker().get(name)
            if entry is not None:
                own = entry["values"].sum() * each
                sums[0, place] = own * _weight(entry.get("reduce_group"))
                sums[1, place] = 1.0
        clear_aux_losses_tracker()
        dist.all_reduce(sums)
        totals, present = sums.tolist()
        return {
            name: total / self._layers
            for name, total, there in zip(NAMES, totals, present, strict=True)
            if there
        }


def _weight(group: dist.ProcessGroup | None) -> float:
    """What a rank's sum counts for in the whole: ranks of ``group`` hold parts of one loss, which
    add up; the other ranks of a pipeline stage hold losses of their own, of which the mean is
    taken; stages hold different layers, which add up."""
    parts = 1 if group is None else dist.get_world_size(group)
    stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return parts / dist.get_world_size(stage)
