"""Watching the loss and the gradient: what is not finite ends the job, a spike is reported."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import torch.distributed as dist

from flagscale.errors import JobError
from flagscale.train.readings import Reading

_WINDOW = 50
_ENOUGH = 10
_LEAST_NATS = 0.5


class LossWatch:
    """Compares each step's loss with the median of the steps before it.

    More than ``spike_factor`` times that median, and more than half a nat above it, is a spike: the
    small losses of what a model knows by heart jump by factors that mean nothing. 0 looks for none.
    Of spikes in a row the first is told. ``fatal`` makes a loss or a gradient norm that is not
    finite an error.
    """

    def __init__(self, *, spike_factor: float, fatal: bool) -> None:
        self._factor = spike_factor
        self._fatal = fatal
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._skipping = ""
        self._spiking = False

    def observe(self, reading: Reading) -> str | None:
        """A warning about this step, or None.

        All ranks call it with the same loss and norm at the same step.

        Raises:
            JobError: the loss or the gradient norm is not finite; names step and ranks.
        """
        step, loss, norm = reading.numbers.step, reading.loss, reading.grad_norm
        if not (math.isfinite(loss) and math.isfinite(norm)):
            if self._fatal:
                raise _not_finite(reading)
            return f"step {step}: loss {loss}, gradient norm {norm}"
        before, self._skipping = self._skipping, reading.numbers.skipped
        if self._skipping:
            told = before == self._skipping
            return None if told else f"step {step} is skipped: {self._skipping}"
        warning = self._spike(step, loss)
        self._recent.append(loss)
        return warning

    def _spike(self, step: int, loss: float) -> str | None:
        if not self._factor or len(self._recent) < _ENOUGH:
            return None
        usual = median(self._recent)
        before, self._spiking = self._spiking, loss > max(self._factor * usual, usual + _LEAST_NATS)
        if before or not self._spiking:
            return None
        return (
            f"loss spike at step {step}: {loss:.4f} is more than {self._factor:g} times "
            f"the median of the last {len(self._recent)} steps, {usual:.4f}"
        )


def _not_finite(reading: Reading) -> JobError:
    step = reading.numbers.step
    flags: list[bool] = [True] * dist.get_world_size()
    dist.all_gather_object(flags, reading.own_loss_finite)
    culprits = [str(rank) for rank, finite in enumerate(flags) if not finite]
    if culprits:
        ranks = f"rank{'s' if len(culprits) > 1 else ''} {', '.join(culprits)}"
        what = f"the loss is {reading.loss} at step {step}; not finite on {ranks}"
        hint = "a lower learning rate, a longer warm-up or clip_grad often help; look at the data"
    else:
        what = (
            f"the gradient norm is {reading.grad_norm} at step {step}, on all ranks "
            f"(the loss is {reading.loss:.4f})"
        )
        hint = "check_for_nan_in_grad: true names the rank, at the cost of waiting in every step"
    return JobError(f"{what}; the weights of this step are not saved", hint=hint)
