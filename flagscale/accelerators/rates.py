"""Short measurements of a device with torch, the same for all kinds of devices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from flagscale.accelerators.health import Rate

if TYPE_CHECKING:
    import torch

MATRIX_PRODUCT = "matrix product"
MEMORY_COPY = "memory copy"
COPY_TO_HOST = "copy to the host"
COPY_FROM_HOST = "copy from the host"
_WINDOWS = 3
_MAX_CALLS = 100_000
_MATRIX_SIZE = {True: 512, False: 8192}
"""Rows and columns of the matrices, by whether the device is the host itself: a product takes a few
milliseconds on either."""
_COPY_BYTES = {True: 64 << 20, False: 256 << 20}
"""Exceeds the caches."""
_TRIAL_FACTOR = 8
_BUSY_SECONDS = 0.3
"""Work that is queued while the device's state is read."""
_HOST_COPY_BYTES = 64 << 20
_SHARE_OF_COPY = 0.4
"""Window of a copy as a fraction of that of the matrix product, which has to heat the device."""
_SHARE_OF_HOST_COPY = 0.1
"""The same for copies to and from the host, for which the devices of a host take turns."""


class Measured(Protocol):
    """The part of an :class:`~flagscale.accelerators.base.Accelerator` that measurements use."""

    @property
    def is_host(self) -> bool: ...

    def synchronize(self, device: torch.device) -> None: ...

    def allocate_host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...


def best_rate(
    call: Callable[[], object],
    synchronize: Callable[[], object],
    seconds: float,
    agree: Callable[[int], int] = lambda count: count,
) -> float:
    """Return the calls per second of the best of three windows of about ``seconds`` each.

    Other processes only make a window slower, so the best one is the least disturbed. A window is
    long enough for a device that is throttled in short intervals to show it.

    Args:
        call: work to submit.
        synchronize: waits until submitted work is done.
        seconds: length of a window.
        agree: for work that several processes do together, returns the same count on all of them.
    """
    call()
    synchronize()
    count = _count_calls(call, synchronize, seconds, agree)
    best = 0.0
    for _ in range(_WINDOWS):
        best = max(best, count / _time_calls(call, synchronize, count))
    return best


def _count_calls(
    call: Callable[[], object],
    synchronize: Callable[[], object],
    seconds: float,
    agree: Callable[[int], int],
) -> int:
    """Return the number of calls that take about ``seconds``, by multiplying a trial."""
    count = 1
    while True:
        elapsed = _time_calls(call, synchronize, count)
        estimate = max(1, min(_MAX_CALLS, math.ceil(count * seconds / elapsed)))
        next_count = agree(estimate)
        if next_count <= _TRIAL_FACTOR * count:
            return next_count
        count *= _TRIAL_FACTOR


def _time_calls(call: Callable[[], object], synchronize: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return time.perf_counter() - start


def measure_rates(
    accelerator: Measured,
    device: torch.device,
    seconds: float,
    while_busy: Callable[[], object],
) -> list[Rate]:
    """Measure a device: dense matrix product (bf16, or fp32 on the host itself), and copy within
    its memory (bytes read and written).

    Args:
        accelerator: adapter of the device.
        device: device to measure.
        seconds: length of a window, see :func:`best_rate`.
        while_busy: called once while the device multiplies matrices at its full rate.
    """
    import torch

    is_host = accelerator.is_host
    synchronize = partial(accelerator.synchronize, device)
    size = _MATRIX_SIZE[is_host]
    dtype = torch.float32 if is_host else torch.bfloat16
    left = torch.randn(size, size, device=device, dtype=dtype)
    right, product = torch.randn_like(left), torch.empty_like(left)
    multiply = partial(torch.mm, left, right, out=product)
    calls = best_rate(multiply, synchronize, seconds)
    for _ in range(0 if is_host else math.ceil(calls * _BUSY_SECONDS)):
        multiply()
    while_busy()
    synchronize()
    operations = calls * 2 * size**3
    rates = [
        Rate(MATRIX_PRODUCT, operations / 1e9, "GFLOP/s")
        if is_host
        else Rate(MATRIX_PRODUCT, operations / 1e12, "TFLOP/s")
    ]
    count = _COPY_BYTES[is_host]
    source = torch.ones(count, device=device, dtype=torch.uint8)
    target = torch.zeros_like(source)
    calls = best_rate(partial(target.copy_, source), synchronize, seconds * _SHARE_OF_COPY)
    return [*rates, Rate(MEMORY_COPY, calls * 2 * count / 1e9, "GB/s")]


def measure_host_copies(accelerator: Measured, device: torch.device, seconds: float) -> list[Rate]:
    """Measure copies to and from pinned host memory of a device that has memory of its own.
    ``seconds`` is the length of a window, see :func:`best_rate`.
    """
    import torch

    if accelerator.is_host:
        return []
    synchronize = partial(accelerator.synchronize, device)
    window = seconds * _SHARE_OF_HOST_COPY
    memory = torch.ones(_HOST_COPY_BYTES, device=device, dtype=torch.uint8)
    host_memory = accelerator.allocate_host_buffer(memory.shape, memory.dtype)
    rates = []
    for name, target, source in (
        (COPY_TO_HOST, host_memory, memory),
        (COPY_FROM_HOST, memory, host_memory),
    ):
        calls = best_rate(partial(target.copy_, source, non_blocking=True), synchronize, window)
        rates.append(Rate(name, calls * _HOST_COPY_BYTES / 1e9, "GB/s"))
    return rates
