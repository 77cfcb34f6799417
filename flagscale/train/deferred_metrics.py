"""Step metrics that are copied from the device asynchronously.

Reading a number from a GPU waits for all queued work, and no new work is queued meanwhile. So a
step's metrics are copied to pinned host memory while the next step is already queued, and read
one step later, at no cost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flagscale.accelerators.device import Device
from flagscale.train.stop_request import StopReason

GRADIENTS_OVERFLOWED = "its gradients overflow at this loss scale, which is lowered until they fit"
"""Reason for skipping a step: the fp16 gradients are not finite."""
GRADIENTS_LOST = "too much of its gradients was lost between hosts (FSCCL_TAIL_ABOVE=skip)"
"""Reason for skipping a step: an all_reduce lost more than the allowed fraction of its data."""


@dataclass(frozen=True)
class HostMetrics:
    """Metrics of a step that the host has as soon as the step is queued."""

    step: int
    consumed_samples: int
    """Sequences that the run has trained on so far, over all ranks."""
    learning_rate: float
    skip_reason: str = ""
    """Reason for skipping the optimizer step (``GRADIENTS_OVERFLOWED``, ``GRADIENTS_LOST``), or an
    empty string.
    """
    zero_gradients: float | None = None
    """Number of gradient elements that are zero (``log_num_zeros_in_grad``), or None."""


@dataclass(frozen=True)
class StepMetrics:
    """All metrics of a step, after the device has finished it."""

    host: HostMetrics
    loss: float
    """Mean over the tokens of the step on all ranks, in nats."""
    grad_norm: float
    stop_reason: StopReason | None
    """Reason to end training that any rank had before it queued this step, or None."""
    is_rank_loss_finite: bool
    """True if this rank's part of the loss is finite, or if the rank computes no loss."""


class DeferredMetrics:
    """Queue of the metrics of steps that are being copied to the host, oldest first."""

    def __init__(self) -> None:
        self._pending: deque[tuple[HostMetrics, torch.Tensor, Any]] = deque()

    def add(self, host_metrics: HostMetrics, values: torch.Tensor) -> None:
        """Start copying the device metrics of a step.

        Args:
            host_metrics: metrics that the host has already.
            values: fp64 tensor [6]: sum of losses, number of tokens, number of ranks with a stop
                signal, number of ranks that are out of time (all four summed over ranks), gradient
                norm, and sum of losses of this rank.
        """
        device = Device.from_torch(values.device)
        if device.is_host:
            self._pending.append((host_metrics, values, None))
            return
        host_values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host_values.copy_(values, non_blocking=True)
        copy_event = device.create_event()
        copy_event.record()
        self._pending.append((host_metrics, host_values, copy_event))

    def pop_completed(self, *, keep_newest: int) -> Iterator[StepMetrics]:
        """Yield the metrics of all but the newest ``keep_newest`` steps.

        Waits until the device has finished these steps.
        """
        while len(self._pending) > keep_newest:
            host_metrics, host_values, copy_event = self._pending.popleft()
            if copy_event is not None:
                copy_event.synchronize()
            yield _step_metrics(host_metrics, host_values)


def _step_metrics(host: HostMetrics, host_values: torch.Tensor) -> StepMetrics:
    loss_sum, tokens, signals, out_of_time, norm, rank_loss = host_values.tolist()
    return StepMetrics(
        host=host,
        loss=loss_sum / tokens if tokens else 0.0,
        grad_norm=norm,
        stop_reason="signal" if signals else "exit-interval" if out_of_time else None,
        is_rank_loss_finite=math.isfinite(rank_loss),
    )
