"""Micro-batches by speed: unlike replicas are timed in the first steps, then counts are fixed.

What is found is a part of the training state. A run that goes on from a checkpoint keeps it, so
that it takes the steps that an uninterrupted one takes; on other replicas it measures anew.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from flagscale.config.arguments import shares
from flagscale.config.arguments.measured_shares import MeasuredShares, conditions
from flagscale.config.arguments.pipeline import pipeline_of
from flagscale.config.arguments.resolve import take_shares
from flagscale.config.arguments.share_out import pass_times, share_out, slowest
from flagscale.train.device import Device
from flagscale.train.state import TrainState


class Stopwatch:
    """Times what a rank computes in a step, from the moment when all ranks begin to that at which
    it has all its gradients and would wait for those of others."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begun: int | None = None
        self.laps: list[int] = []
        """Nanoseconds of each step that was timed."""
        self.running = False

    def start(self) -> None:
        """A step begins. All ranks call it."""
        together = torch.zeros(1, device=self._device.torch_device)
        dist.all_reduce(together)
        self._device.synchronize()
        self._begun = time.perf_counter_ns()

    def stop_before(self, work: Callable[..., None]) -> Callable[..., None]:
        """``work``, which takes the gradients of a step to the others, as a function that ends the
        step's time first."""

        def stopped(*given: Any, **named: Any) -> None:
            if self._begun is not None:
                self._device.synchronize()
                self.laps.append(time.perf_counter_ns() - self._begun)
                self._begun = None
            work(*given, **named)

        return stopped


class Sharing:
    """The shares of unlike replicas whose speed decides how many micro-batches each takes."""

    def __init__(
        self,
        args: argparse.Namespace,
        state: TrainState,
        rank: int,
        device: Device,
        say: Callable[[str], None],
    ) -> None:
        """Goes on with what ``state`` has of the checkpoint, if it was measured on such replicas.
        All ranks call it."""
        self._args = args
        self._state = state
        self._rank = rank
        self._device = device
        self._say = say
        self.stopwatch = Stopwatch(device)
        self._conditions = conditions(vars(args), self._devices())
        known, state.measured_shares = state.measured_shares, None
        if known is None:
            self.stopwatch.running = True
        elif changed := known.other(self._conditions):
            say(f"micro-batches are measured anew: the checkpoint's counts are of other {changed}")
            self.stopwatch.running = True
        else:
            self._take(known)
            say(f"micro-batches are shared out as the checkpoint has it: {known.text()}")

    def settle(self) -> bool:
        """Called after each step: shares out micro-batches once enough steps are timed. Whether
        this rank and all others take another share of the next step than of the last."""
        if not self.stopwatch.running or len(self.stopwatch.laps) < shares.MEASURED_STEPS:
            return False
        self.stopwatch.running = False
        args, pipeline = self._args, pipeline_of(vars(self._args))
        sizes = [share.size for share in args.shares]
        even = tuple(share.count for share in args.shares)
        times = pass_times(self._laps(), even, pipeline)
        counts = share_out(times, sizes, args.global_batch_size, pipeline)
        least, before = (slowest(times, found, pipeline) for found in (counts, even))
        if least == before:
            counts = even  # of several that are as good that which is in use
        found = MeasuredShares(
            counts, tuple(time * pipeline.chunks for time in times), self._conditions
        )
        self._take(found)
        self._say(
            f"micro-batches are shared out by measured times: {found.text()}; the slowest replica "
            f"is done in {least / 1e6:,.1f} ms, with even counts in {before / 1e6:,.1f} ms"
        )
        return counts != even

    def _take(self, found: MeasuredShares) -> None:
        self._state.measured_shares = found
        sizes = [share.size for share in self._args.shares]
        take_shares(self._args, shares.made_of(sizes, found.counts), self._rank)

    def _laps(self) -> list[list[int]]:
        """The time of each replica in the steps that count, in nanoseconds: its slowest rank's."""
        args, laps = self._args, self.stopwatch.laps[1:]
        table = torch.zeros(len(laps), len(args.shares), dtype=torch.int64)
        table[:, self._rank // shares.replica_ranks(vars(args))] = torch.tensor(laps)
        table = table.to(self._device.torch_device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        rows: list[list[int]] = table.tolist()
        return rows

    def _devices(self) -> list[str]:
        """What each replica computes on."""
        names: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(names, self._device.name)
        return names[:: shares.replica_ranks(vars(self._args))]
