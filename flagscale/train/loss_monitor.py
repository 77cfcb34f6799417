"""Monitoring of loss and gradient norm: non-finite values end the job, spikes are reported."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import torch.distributed as dist

from flagscale.errors import JobError
from flagscale.train.deferred_metrics import StepMetrics

_MEDIAN_WINDOW_STEPS = 50
_MIN_STEPS_BEFORE_DETECTION = 10
_MIN_SPIKE_NATS = 0.5


class LossMonitor:
    """Detects loss spikes and non-finite values.

    A spike is a loss of more than ``spike_factor`` times the median of the previous steps that also
    exceeds it by more than half a nat. The second condition ignores the fluctuation of very small
    losses, as of memorized data. A factor of 0 disables the detection. Of consecutive spikes only
    the first is reported. ``fail_on_nonfinite`` turns a non-finite loss or gradient norm into an
    error.
    """

    def __init__(self, *, spike_factor: float, fail_on_nonfinite: bool) -> None:
        self._factor = spike_factor
        self._fail_on_nonfinite = fail_on_nonfinite
        self._recent_losses: deque[float] = deque(maxlen=_MEDIAN_WINDOW_STEPS)
        self._skip_reason = ""
        self._spiking = False

    def check_step(self, metrics: StepMetrics) -> str | None:
        """Check a step and return a warning, or None.

        All ranks call it with the same loss and norm of the same step.

        Raises:
            JobError: the loss or the gradient norm is not finite; the message names step and ranks.
        """
        step, loss, norm = metrics.host.step, metrics.loss, metrics.grad_norm
        if not (math.isfinite(loss) and math.isfinite(norm)):
            if self._fail_on_nonfinite:
                raise _not_finite_error(metrics)
            return f"step {step}: loss {loss}, gradient norm {norm}"
        previous_reason, self._skip_reason = self._skip_reason, metrics.host.skip_reason
        if self._skip_reason:
            already_reported = previous_reason == self._skip_reason
            return None if already_reported else f"step {step} is skipped: {self._skip_reason}"
        warning = self._detect_spike(step, loss)
        self._recent_losses.append(loss)
        return warning

    def _detect_spike(self, step: int, loss: float) -> str | None:
        if not self._factor or len(self._recent_losses) < _MIN_STEPS_BEFORE_DETECTION:
            return None
        median_loss = median(self._recent_losses)
        was_spiking = self._spiking
        self._spiking = loss > max(self._factor * median_loss, median_loss + _MIN_SPIKE_NATS)
        if was_spiking or not self._spiking:
            return None
        return (
            f"loss spike at step {step}: {loss:.4f} is more than {self._factor:g} times "
            f"the median of the last {len(self._recent_losses)} steps, {median_loss:.4f}"
        )


def _not_finite_error(metrics: StepMetrics) -> JobError:
    step = metrics.host.step
    finite_flags: list[bool] = [True] * dist.get_world_size()
    dist.all_gather_object(finite_flags, metrics.is_rank_loss_finite)
    failed_ranks = [str(rank) for rank, finite in enumerate(finite_flags) if not finite]
    if failed_ranks:
        ranks = f"rank{'s' if len(failed_ranks) > 1 else ''} {', '.join(failed_ranks)}"
        message = f"the loss is {metrics.loss} at step {step}; not finite on {ranks}"
        hint = "a lower learning rate, a longer warm-up or clip_grad often help; look at the data"
    else:
        message = (
            f"the gradient norm is {metrics.grad_norm} at step {step}, on all ranks "
            f"(the loss is {metrics.loss:.4f})"
        )
        hint = "check_for_nan_in_grad: true names the rank, at the cost of waiting in every step"
    return JobError(f"{message}; the weights of this step are not saved", hint=hint)
