"""Throughput measurement of the training loop."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flagscale.config.arguments.layout import tokens_per_sample
from flagscale.train.device import Device
from flagscale.train.models.base import get_model_spec
from flagscale.train.report import Throughput


class ThroughputMeter:
    """Stopwatch over training steps that excludes evaluations and checkpoints.

    A lap is the time between two reports.

    Call :meth:`finish_lap` only when the device has finished the steps to be counted.
    """

    def __init__(
        self, args: argparse.Namespace, *, vocabulary: int, device: Device, world_size: int
    ) -> None:
        self._device = device
        self._world_size = world_size
        self._tokens_per_sample = tokens_per_sample(vars(args))
        self._flops_per_token = get_model_spec(args).flops_per_token(args, vocabulary)
        self._peak_tflops = args.peak_tflops or device.peak_tflops(
            sixteen_bit=args.bf16 or args.fp16
        )
        self._lap_start = time.monotonic()
        self._steps, self._samples = 0, 0
        self._excluded_seconds = 0.0

    def start_lap(self) -> None:
        """Start a lap and discard the current one."""
        self._lap_start, self._excluded_seconds = time.monotonic(), 0.0
        self._steps, self._samples = 0, 0

    def count_step(self, samples: int) -> None:
        """Count a step that trained on ``samples`` samples over all ranks."""
        self._steps += 1
        self._samples += samples

    def finish_lap(self) -> Throughput:
        """Return the throughput since the last lap and start the next one."""
        seconds = time.monotonic() - self._lap_start - self._excluded_seconds
        seconds = max(seconds, 1e-9)
        step_seconds = seconds / max(self._steps, 1)
        tokens = self._samples * self._tokens_per_sample
        tflops = None
        if self._flops_per_token is not None:
            tflops = tokens * self._flops_per_token / seconds / self._world_size / 1e12
        self.start_lap()
        return Throughput(
            step_seconds=step_seconds,
            tokens_per_second=tokens / seconds,
            tflops_per_gpu=tflops,
            mfu=tflops / self._peak_tflops if self._peak_tflops and tflops is not None else None,
            memory_gib=self._device.peak_memory_gib(),
            ranks=self._world_size,
        )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager whose duration is excluded from the lap."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._excluded_seconds += time.monotonic() - begin
