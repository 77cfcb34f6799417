"""Distribution of micro-batches over heterogeneous data-parallel replicas by measured speed.

A replica's share of a global batch is its number of micro-batches (``count``) and their size in
sequences (``size``). Replicas are timed in the first steps, then their micro-batch counts are
fixed. The counts are part of the training state. A run that resumes from a checkpoint keeps them,
so that it takes the same steps as an uninterrupted run. If the replicas have changed, it measures
again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from flagscale.config.arguments.derive import assign_shares
from flagscale.config.arguments.hetero.microbatch_split import (
    MEASURED_STEPS,
    MeasuredSplit,
    measured_conditions,
    pass_times,
    replica_ranks,
    shares_from,
    slowest_time,
    split_microbatches,
)
from flagscale.config.arguments.rules.parallel_layout import pipeline_of
from flagscale.train.device import Device
from flagscale.train.state import TrainState


class StepStopwatch:
    """Measures the compute time of a rank in each step.

    A lap begins when all ranks have started the step. It ends when this rank has computed all its
    gradients, before it would wait for the gradients of other ranks.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._start_ns: int | None = None
        self.lap_times_ns: list[int] = []
        """Duration of each timed step in nanoseconds."""
        self.enabled = False
        """True if the next steps are to be timed; set by :class:`MicrobatchBalancer`."""

    def start_lap(self) -> None:
        """Start the lap of a step. All ranks call it."""
        barrier_tensor = torch.zeros(1, device=self._device.torch_device)
        dist.all_reduce(barrier_tensor)
        self._device.synchronize()
        self._start_ns = time.perf_counter_ns()

    def stop_lap_before(self, reduce_gradients: Callable[..., None]) -> Callable[..., None]:
        """Return ``reduce_gradients`` with a preceding end of the lap."""

        def stop_and_reduce(*args: Any, **kwargs: Any) -> None:
            if self._start_ns is not None:
                self._device.synchronize()
                self.lap_times_ns.append(time.perf_counter_ns() - self._start_ns)
                self._start_ns = None
            reduce_gradients(*args, **kwargs)

        return stop_and_reduce


class MicrobatchBalancer:
    """Assigns micro-batches to heterogeneous replicas according to their measured speed."""

    def __init__(
        self,
        args: argparse.Namespace,
        state: TrainState,
        rank: int,
        device: Device,
        log: Callable[[str], None],
    ) -> None:
        """Restore the counts of the checkpoint if they were measured on the same replicas.

        All ranks call it.

        Args:
            args: resolved arguments of this rank. The counts are written to them.
            state: training state, which holds the counts of the checkpoint if one was loaded.
            rank: global rank.
            device: device of this rank.
            log: logs a line, once per job.
        """
        self._args = args
        self._state = state
        self._rank = rank
        self._device = device
        self._log = log
        self.stopwatch = StepStopwatch(device)
        self._conditions = measured_conditions(vars(args), self._gather_device_names())
        checkpoint_shares, state.measured_shares = state.measured_shares, None
        if checkpoint_shares is None:
            self.stopwatch.enabled = True
        elif changed_condition := checkpoint_shares.differing_conditions(self._conditions):
            log(
                f"micro-batch counts are measured again: the checkpoint's are for other "
                f"{changed_condition}"
            )
            self.stopwatch.enabled = True
        else:
            self._apply_shares(checkpoint_shares)
            log(f"micro-batch counts are taken from the checkpoint: {checkpoint_shares.format()}")

    def rebalance_microbatches(self) -> bool:
        """Set the micro-batch counts once enough steps are timed; called after each step.

        Returns:
            True on all ranks if counts change with the next step, in which case data iterators must
            be rebuilt.
        """
        if not self.stopwatch.enabled or len(self.stopwatch.lap_times_ns) < MEASURED_STEPS:
            return False
        self.stopwatch.enabled = False
        args, pipeline = self._args, pipeline_of(vars(self._args))
        sizes = [share.size for share in args.shares]
        even_counts = tuple(share.count for share in args.shares)
        # Duration of the forward and backward pass of a micro-batch on each replica.
        pass_times_ns = pass_times(self._gather_lap_times(), even_counts, pipeline)
        counts = split_microbatches(pass_times_ns, sizes, args.global_batch_size, pipeline)
        balanced_ns = slowest_time(pass_times_ns, counts, pipeline)
        even_ns = slowest_time(pass_times_ns, even_counts, pipeline)
        if balanced_ns == even_ns:
            counts = even_counts  # keep the current assignment if another is not faster
        measured_shares = MeasuredSplit(
            counts, tuple(time * pipeline.chunks for time in pass_times_ns), self._conditions
        )
        self._apply_shares(measured_shares)
        self._log(
            "micro-batch counts are set by measured times: "
            f"{measured_shares.format()}; the slowest replica takes {balanced_ns / 1e6:,.1f} ms, "
            f"with even counts {even_ns / 1e6:,.1f} ms"
        )
        return counts != even_counts

    def _apply_shares(self, measured_shares: MeasuredSplit) -> None:
        self._state.measured_shares = measured_shares
        sizes = [share.size for share in self._args.shares]
        assign_shares(self._args, shares_from(sizes, measured_shares.counts), self._rank)

    def _gather_lap_times(self) -> list[list[int]]:
        """Return the nanoseconds of each replica's slowest rank in each step, [steps][replicas].

        The first lap is excluded because it contains warm-up.
        """
        args, lap_times_ns = self._args, self.stopwatch.lap_times_ns[1:]
        table = torch.zeros(len(lap_times_ns), len(args.shares), dtype=torch.int64)
        table[:, self._rank // replica_ranks(vars(args))] = torch.tensor(lap_times_ns)
        table = table.to(self._device.torch_device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        replica_times_ns: list[list[int]] = table.tolist()
        return replica_times_ns

    def _gather_device_names(self) -> list[str]:
        """Return the device name of each replica."""
        names: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(names, self._device.name)
        return names[:: replica_ranks(vars(self._args))]
