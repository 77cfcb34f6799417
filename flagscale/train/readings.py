"""Numbers of a step, read from the device without holding up the host.

Reading a number from a GPU waits until all the work before it is done, and meanwhile no new work
is queued. So a step's numbers are copied to the host while the next step is already queued, and
read then: one step late, which costs nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flagscale.accelerators.device import Device
from flagscale.train.signals import Reason

OVERFLOW = "its gradients overflow at this loss scale, which is lowered until they fit"
LOST = "too much of its gradients was lost between hosts (FSCCL_TAIL_ABOVE=skip)"


@dataclass(frozen=True)
class StepNumbers:
    """What is known on the host when a step has been queued."""

    step: int
    samples: int
    learning_rate: float
    skipped: str = ""
    """Why the optimizer left the weights alone (``OVERFLOW``, ``LOST``); empty where it did not."""
    zeros: float | None = None


@dataclass(frozen=True)
class Reading:
    """A step's numbers after the device has finished it."""

    numbers: StepNumbers
    loss: float
    """Mean over the step's tokens on all ranks, in nats."""
    grad_norm: float
    stop: Reason | None
    """Why training should end, as far as any rank knew before it had queued this step."""
    own_loss_finite: bool
    """Whether this rank's own part of the loss was finite (also when it has no part)."""


class Readings:
    """Steps whose numbers are on their way to the host, oldest first."""

    def __init__(self) -> None:
        self._pending: deque[tuple[StepNumbers, torch.Tensor, Any]] = deque()

    def add(self, numbers: StepNumbers, values: torch.Tensor) -> None:
        """Start copying ``values``: loss sum, tokens, signals, ranks out of
        time, gradient norm, own loss sum."""
        device = Device.of(values.device)
        if device.is_host:
            self._pending.append((numbers, values, None))
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = device.event()
        arrived.record()
        self._pending.append((numbers, host, arrived))

    def take(self, *, leave: int) -> Iterator[Reading]:
        """Read all but the newest ``leave`` steps, waiting for the device where it must."""
        while len(self._pending) > leave:
            numbers, host, arrived = self._pending.popleft()
            if arrived is not None:
                arrived.synchronize()
            yield _reading(numbers, host)


def _reading(numbers: StepNumbers, host: torch.Tensor) -> Reading:
    loss_sum, tokens, signals, late, norm, own = host.tolist()
    return Reading(
        numbers=numbers,
        loss=loss_sum / tokens if tokens else 0.0,
        grad_norm=norm,
        stop="signal" if signals else "exit-interval" if late else None,
        own_loss_finite=math.isfinite(own),
    )
