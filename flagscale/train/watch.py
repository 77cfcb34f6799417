"""Watching the loss and the gradient: what is not finite ends the job, a spike is reported."""

from __future__ import annotations

import math
from collections import deque

import torch.distributed as dist

from flagscale.errors import JobError
from flagscale.train.readings import Reading

_WINDOW = 50
_ENOUGH = 10


class LossWatch:
    """Compares each step's loss with the mean of the steps before it.

    ``spike_factor`` times that mean is a spike; 0 looks for none. ``fatal`` makes a loss or a
    gradient norm that is not finite an error.
    """

    def __init__(self, *, spike_factor: float, fatal: bool) -> None:
        self._factor = spike_factor
        self._fatal = fatal
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._skipping = False

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
            overflow = "its gradients overflow at this loss scale, which is lowered until they fit"
            return None if before else f"step {step} is skipped: {overflow}"
        warning = None
        if self._factor and len(self._recent) >= _ENOUGH:
            mean = sum(self._recent) / len(self._recent)
            if loss > self._factor * mean:
                warning = (
                    f"loss spike at step {step}: {loss:.4f} is more than {self._factor:g} times "
                    f"the mean of the last {len(self._recent)} steps, {mean:.4f}"
                )
        self._recent.append(loss)
        return warning


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
