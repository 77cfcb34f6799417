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
        self._length = args.seq_length
        self._flops_per_token = spec_of(args).flops_per_token(args, vocabulary)
        self._peak = args.peak_tflops or device.peak_tflops(sixteen_bit=args.bf16 or args.fp16)
        self._since = time.monotonic()
        self._steps, self._samples = 0, 0
        self._left_out = 0.0

    def start(self) -> None:
        """Begin a lap."""
        self._since, self._left_out = time.monotonic(), 0.0
        self._steps, self._samples = 0, 0

    def add(self, samples: int) -> None:
        """A step has trained on so many sequences, over all ranks."""
        self._steps += 1
        self._samples += samples

    def lap(self) -> Speed:
        """Throughput since the last lap; begins the next one."""
        seconds = time.monotonic() - self._since - self._left_out
        seconds = max(seconds, 1e-9)
        per_step, tokens = seconds / max(self._steps, 1), self._samples * self._length
        tflops = None
        if self._flops_per_token is not None:
            tflops = tokens * self._flops_per_token / seconds / self._world_size / 1e12
        self.start()
        return Speed(
            step_seconds=per_step,
            tokens_per_second=tokens / seconds,
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
