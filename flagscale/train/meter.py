"""Measures throughput between two looks at the clock."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flagscale.train.device import Device
from flagscale.train.models.base import spec_of
from flagscale.train.report import Speed


class Meter:
    """A stopwatch over steps. Evaluations and checkpoints are left out of the time.

    The caller reads it when the device has finished the steps that count.
    """

    def __init__(
        self, args: argparse.Namespace, *, vocabulary: int, device: Device, world_size: int
    ) -> None:
        self._device = device
        self._world_size = world_size
        self._tokens_per_step = args.global_batch_size * args.seq_length
        flops = spec_of(args).flops_per_token(args, vocabulary)
        self._flops_per_step = None if flops is None else self._tokens_per_step * flops
        self._peak = args.peak_tflops or device.peak_tflops(sixteen_bit=args.bf16 or args.fp16)
        self._since = time.monotonic()
        self._step = 0
        self._left_out = 0.0

    def start(self, step: int) -> None:
        """Begin after ``step``."""
        self._since, self._step, self._left_out = time.monotonic(), step, 0.0

    def lap(self, step: int) -> Speed:
        """Throughput since the last lap, up to ``step``; begins the next lap."""
        seconds = time.monotonic() - self._since - self._left_out
        per_step = max(seconds, 1e-9) / max(step - self._step, 1)
        tflops = None
        if self._flops_per_step is not None:
            tflops = self._flops_per_step / per_step / self._world_size / 1e12
        self.start(step)
        return Speed(
            step_seconds=per_step,
            tokens_per_second=self._tokens_per_step / per_step,
            tflops_per_gpu=tflops,
            mfu=tflops / self._peak if self._peak and tflops is not None else None,
            memory_gib=self._device.peak_memory_gib(),
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time is left out of the lap."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._left_out += time.monotonic() - begin
