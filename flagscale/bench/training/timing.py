"""Measurement of computation and communication in a training step, by a communication hook of
DistributedDataParallel (DDP).

The hook does the same as DDP without one: it divides a bucket by the number of ranks and starts
its all_reduce. DDP passes it the last bucket when the last gradient is ready. From then on the
backward pass only waits; this time is called *exposed*. The backward pass also waits for a backend
that reduces within the call, and this time counts as exposed too.
"""

# No "from __future__ import annotations": DDP checks the types in the annotations of its hook.
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup

from flagscale.accelerators.device import Device


@dataclass
class StepClock:
    """Clock of one rank for the current step."""

    device: Device
    group: ProcessGroup
    buckets: list[int] = field(default_factory=list)
    """Size of each bucket in bytes, in the order of their reduction in this step."""
    _call_seconds: float = 0.0
    _last_return_time: float = 0.0
    _last_bucket_event: Any = None
    _reduction_spans: list[tuple[float, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start a step."""
        self.buckets.clear()
        self._call_seconds, self._last_bucket_event = 0.0, None
        with self._lock:
            self._reduction_spans.clear()

    def hook(self, _state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket; for ``register_comm_hook``."""
        begin = time.perf_counter()
        if not self.device.is_host:
            self._last_bucket_event = self.device.create_event(timed=True)
            self._last_bucket_event.record()
        tensor = bucket.buffer()
        self.buckets.append(tensor.numel() * tensor.element_size())
        tensor.div_(self.group.size())
        call_begin = time.perf_counter()
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        future: torch.futures.Future[Tensor] = work.get_future().then(
            lambda finished: self._on_reduced(begin, finished)
        )
        self._last_return_time = time.perf_counter()
        self._call_seconds += self._last_return_time - call_begin
        return future

    def _on_reduced(self, begin: float, future: Any) -> Tensor:
        """Called when a bucket has been reduced; on a device, when the work has been issued."""
        if self.device.is_host:
            with self._lock:
                self._reduction_spans.append((begin, time.perf_counter()))
        value = future.value()
        reduced: Tensor = value[0] if isinstance(value, list | tuple) else value
        return reduced

    def end_backward(self) -> "BackwardWait":
        """Return the time that the backward pass waited. To be called when it has returned;
        :attr:`BackwardWait.seconds` is valid after the device has been synchronized.
        """
        if self.device.is_host:
            return BackwardWait(self._call_seconds + time.perf_counter() - self._last_return_time)
        end = self.device.create_event(timed=True)
        end.record()
        return BackwardWait(0.0, self._last_bucket_event, end)

    def communication(self) -> float | None:
        """Return the seconds of this step in which any bucket was being reduced; None if not
        measured.
        """
        if not self.device.is_host:
            return None
        with self._lock:
            return union_length(self._reduction_spans)


@dataclass(frozen=True)
class BackwardWait:
    """Time that a backward pass waited for reductions: ``host_seconds``, or between two events of a
    device.
    """

    host_seconds: float
    begin: Any = None
    end: Any = None

    @property
    def seconds(self) -> float:
        """The time in seconds. Events of a device must have completed."""
        if self.begin is None:
            return self.host_seconds
        return float(self.begin.elapsed_time(self.end)) / 1e3


def union_length(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (begin, end)."""
    total, covered_end = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, covered_end))
        covered_end = max(covered_end, end)
    return total
