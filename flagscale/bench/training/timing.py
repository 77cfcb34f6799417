"""Compute and communication of a step apart, by a hook on DistributedDataParallel's buckets.

The hook does what DDP does without one: it divides a bucket by the number of ranks and starts its
sum. The last bucket is handed over when the last gradient is there; what is left of the backward
pass from then on is waiting, and is called exposed. A backend that sums within the call makes the
backward pass wait there, so that time counts as well.
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
class Clock:
    """Of one rank: the marks of the step that is under way."""

    device: Device
    group: ProcessGroup
    buckets: list[int] = field(default_factory=list)
    """Bytes of each bucket, in the order they were summed in this step."""
    _inside: float = 0.0
    _left: float = 0.0
    _event: Any = None
    _spans: list[tuple[float, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """A step begins."""
        self.buckets.clear()
        self._inside, self._event = 0.0, None
        with self._lock:
            self._spans.clear()

    def hook(self, _state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket. For ``register_comm_hook``."""
        begin = time.perf_counter()
        if not self.device.is_host:
            self._event = self.device.event(timed=True)
            self._event.record()
        tensor = bucket.buffer()
        self.buckets.append(tensor.numel() * tensor.element_size())
        tensor.div_(self.group.size())
        scaled = time.perf_counter()
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        future: torch.futures.Future[Tensor] = work.get_future().then(
            lambda done: self._done(begin, done)
        )
        self._left = time.perf_counter()
        self._inside += self._left - scaled
        return future

    def _done(self, begin: float, future: Any) -> Tensor:
        """A bucket has been summed; on a device only its work has been issued."""
        if self.device.is_host:
            with self._lock:
                self._spans.append((begin, time.perf_counter()))
        found = future.value()
        summed: Tensor = found[0] if isinstance(found, list | tuple) else found
        return summed

    def waited(self) -> "Wait":
        """The backward pass has returned: how long it waited, which :attr:`Wait.seconds` tells
        once the device has been awaited."""
        if self.device.is_host:
            return Wait(self._inside + time.perf_counter() - self._left)
        end = self.device.event(timed=True)
        end.record()
        return Wait(0.0, self._event, end)

    def communication(self) -> float | None:
        """Seconds of this step in which any bucket was under way; None where nothing tells."""
        if not self.device.is_host:
            return None
        with self._lock:
            return covered(self._spans)


@dataclass(frozen=True)
class Wait:
    """How long a backward pass waited for sums."""

    known: float
    begin: Any = None
    end: Any = None

    @property
    def seconds(self) -> float:
        """Between the marks; with those of a device, only after it was awaited."""
        if self.begin is None:
            return self.known
        return float(self.begin.elapsed_time(self.end)) / 1e3


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of what any of these spans covers."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
