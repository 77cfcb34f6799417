"""Comparison of the ranks' times at every report, for :mod:`.stragglers`.

The times of a report are gathered while training goes on, and are processed at the next one, so
that no rank waits for them.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from flagscale.config.arguments.hetero.microbatch_split import is_split_measured
from flagscale.status import HOST_VARIABLE
from flagscale.train.device import Device
from flagscale.train.distributed import gather_from_ranks
from flagscale.train.report import TrainingReporter
from flagscale.train.section_recorder import SectionRecorder
from flagscale.train.section_times import ROW_LENGTH, SectionTimes
from flagscale.train.stragglers import RankPlace, StragglerDetector, median_sections


class RankComparison:
    """Gathers the times of all ranks, and reports stragglers on the rank that reports."""

    def __init__(
        self,
        args: argparse.Namespace,
        device: Device,
        reporter: TrainingReporter,
        sections: SectionRecorder,
    ) -> None:
        """Exchange the places of the ranks. All ranks call it.

        Args:
            args: resolved arguments of this rank.
            device: device of this rank.
            reporter: console, status events and metrics sinks.
            sections: measures the steps of this rank.
        """
        self._sections = sections
        self._device = device.torch_device
        self._reporter = reporter
        places = gather_from_ranks(_describe_place(args, device))
        detector = StragglerDetector(places, args.straggler_threshold)
        self._detector = detector if detector.has_equal_ranks else None
        self._world_size = len(places)
        self._gathered: tuple[int, torch.Tensor, Any] | None = None

    def report(self, step: int) -> None:
        """Report the times of this rank since the last report, and start gathering those of all.

        All ranks call it, for the same steps, after the device has finished ``step``.
        """
        times = self._sections.pop_times()
        self._reporter.write_sections(step, times)
        if self._world_size == 1:
            if times is not None:
                self._reporter.log_sections(step, times.seconds, 0.0)
            return
        self._process_last_report()
        row = [0.0] * ROW_LENGTH if times is None else times.to_row()
        values = torch.tensor(row, dtype=torch.float64).to(self._device)
        table = values.new_empty(self._world_size * ROW_LENGTH)
        self._gathered = step, table, dist.all_gather_into_tensor(table, values, async_op=True)

    def close(self) -> None:
        """Process the last report."""
        self._process_last_report()

    def _process_last_report(self) -> None:
        if self._gathered is None:
            return
        step, table, work = self._gathered
        self._gathered = None
        work.wait()
        if not self._reporter.is_reporting_rank:
            return
        rows = table.view(self._world_size, ROW_LENGTH).tolist()
        times = [SectionTimes.from_row(row) for row in rows]
        update, cost = None, None
        if self._detector is not None:
            update = self._detector.add_report(times, time.monotonic())
            cost = self._detector.cost
        if update is not None:
            self._reporter.log_stragglers(step, update)
        self._reporter.log_sections(step, median_sections(times), cost)


def _describe_place(args: argparse.Namespace, device: Device) -> RankPlace:
    """Return the place of this rank.

    Ranks of equal work are those of the same stage that train as many sequences with the same
    experts, which may get more tokens than others.
    """
    host = os.environ.get(HOST_VARIABLE) or socket.gethostname()
    experts = None
    if args.num_moe_experts:
        experts = (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if args.stage is not None:
        stage = args.stage.index
    batch = args.micro_batch_size, args.num_microbatches
    if is_split_measured(vars(args)):
        # Replicas get as many micro-batches as they are fast.
        batch = ("measured", args.share)
    return RankPlace(host, repr((device.product, stage, batch, experts)))
