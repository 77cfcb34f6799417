"""Aggregation of mixture-of-experts router losses for logging.

megatron.core adds the gradient of these losses inside the routers and sums their values layer by
layer in a table per rank. This module reduces the tables of all ranks to one number per loss.
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

from flagscale.estimate.arithmetic import moe_layer_flags, mtp_depth

# Names of the router losses in megatron.core's tracker.
LOSS_NAMES = (
    "load_balancing_loss",
    "seq_load_balancing_loss",
    "global_load_balancing_loss",
    "z_loss",
)


class RouterLossAverages:
    """Averages the router losses between two calls of :meth:`pop_averages`."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self._layer_count = sum(moe_layer_flags(args)) + moe_layer_flags(args)[-1] * mtp_depth(args)
        # Weight of a heterogeneous replica: its fraction of a step's sequences, relative to the
        # mean.
        self._sequence_weight = None
        if args.shares is not None:
            self._sequence_weight = args.share.size * len(args.shares) / args.global_batch_size
        self._device = device
        self._steps, self._micro_batches = 0, 0

    def count_step(self, micro_batches: int) -> None:
        """Count a step of ``micro_batches`` micro-batches on this rank."""
        self._steps += 1
        self._micro_batches += micro_batches

    def pop_averages(self) -> dict[str, float]:
        """Return the unscaled router losses and reset the sums.

        Collective: all ranks call it. It synchronizes the device.

        Each value is the mean over micro-batches of all steps since the last call, over MoE layers
        and over ranks. With heterogeneous replicas it is the mean over sequences. Empty for a model
        without experts. A load-balancing loss is 1 if all experts get the same share of the tokens.
        """
        steps, micro_batches = self._steps, self._micro_batches
        self._steps, self._micro_batches = 0, 0
        if not self._layer_count or not steps:
            return {}
        if self._sequence_weight is None:
            weight = 1.0 / micro_batches
        else:
            weight = self._sequence_weight / steps
        # Rows: weighted sums, and whether megatron.core tracks the loss.
        table = torch.zeros(2, len(LOSS_NAMES), dtype=torch.float64, device=self._device)
        for index, name in enumerate(LOSS_NAMES):
            entry = get_moe_layer_wise_logging_tracker().get(name)
            if entry is not None:
                rank_loss = entry["values"].sum() * weight
                table[0, index] = rank_loss * _rank_weight(entry.get("reduce_group"))
                table[1, index] = 1.0
        clear_aux_losses_tracker()
        dist.all_reduce(table)
        totals, tracked_flags = table.tolist()
        return {
            name: total / self._layer_count
            for name, total, is_tracked in zip(LOSS_NAMES, totals, tracked_flags, strict=True)
            if is_tracked
        }


def _rank_weight(group: dist.ProcessGroup | None) -> float:
    """Return the weight of a rank's sum in the mean over the model.

    The ranks of ``group`` hold summands of one loss. Other groups of the same pipeline stage have
    different losses, of which the mean is taken. Stages hold different layers, whose losses are
    summed.
    """
    group_size = 1 if group is None else dist.get_world_size(group)
    stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return group_size / dist.get_world_size(stage)
