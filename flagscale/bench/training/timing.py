"""Separation of computation and communication in a step, by a hook on DistributedDataParallel's
buckets.

The hook does the same as DDP without one: it divides a bucket by the number of ranks and starts
its all_reduce. The last bucket is passed to it when the last gradient is ready. From then on the
backward pass only waits, and this time is called exposed. A backend that reduces within the call
makes the backward pass wait there, so that this time counts as well.
"""

# DDP reads the annotations of its hook, so they are no texts here.
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
    _inside_seconds: float = 0.0
    _last_return: float = 0.0
    _event: Any = None
    _spans: list[tuple[float, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start a step."""
        self.buckets.clear()
        self._inside_seconds, self._event = 0.0, None
        with self._lock:
            self._spans.clear()

    def hook(self, _state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket; for ``register_comm_hook``."""
        begin = time.perf_counter()
        if not self.device.is_host:
            self._event = self.device.create_event(timed=True)
            self._event.record()
        tensor = bucket.buffer()
        self.buckets.append(tensor.numel() * tensor.element_size())
        tensor.div_(self.group.size())
        scaled = time.perf_counter()
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        future: torch.futures.Future[Tensor] = work.get_future().then(
            lambda done: self._on_reduced(begin, done)
        )
        self._last_return = time.perf_counter()
        self._inside_seconds += self._last_return - scaled
        return future

    def _on_reduced(self, begin: float, future: Any) -> Tensor:
        """Called when a bucket has been reduced; on a device, when the work has been issued."""
        if self.device.is_host:
            with self._lock:
                self._spans.append((begin, time.perf_counter()))
        value = future.value()
        summed: Tensor = value[0] if isinstance(value, list | tuple) else value
        return summed

    def end_backward(self) -> "BackwardWait":
        """Call when the backward pass has returned: returns its wait, whose :attr:`Wait.seconds` is
        valid once the device has been synchronized.
        """
        if self.device.is_host:
            return BackwardWait(self._inside_seconds + time.perf_counter() - self._last_return)
        end = self.device.create_event(timed=True)
        end.record()
        return BackwardWait(0.0, self._event, end)

    def communication(self) -> float | None:
        """Return the seconds of this step in which any bucket was being reduced; None if not
        measured.
        """
        if not self.device.is_host:
            return None
        with self._lock:
            return union_length(self._spans)


@dataclass(frozen=True)
class BackwardWait:
    """Time that a backward pass waited for reductions."""

    host_seconds: float
    begin: Any = None
    end: Any = None

    @property
    def seconds(self) -> float:
        """Time between the marks. Device marks require a synchronized device."""
        if self.begin is None:
            return self.host_seconds
        return float(self.begin.elapsed_time(self.end)) / 1e3


def union_length(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of some intervals."""
    total, covered_until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return total
