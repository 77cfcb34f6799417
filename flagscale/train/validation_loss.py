"""Validation loss of a run: its best evaluation, and when training stops for want of improvement.

No torch. The losses are equal on all ranks, and so are the decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class ValidationHistory:
    """Evaluations of a run so far. Checkpoints contain it, so that a resumed run decides alike.

    Attributes:
        best_loss: lowest validation loss; None before the first evaluation.
        best_step: step of the lowest loss.
        reference_loss: loss that an evaluation has to improve by ``early_stopping_min_delta``.
        reference_step: step of the last such improvement.
        evaluations_without_improvement: number of evaluations since then.
    """

    best_loss: float | None = None
    best_step: int = 0
    reference_loss: float | None = None
    reference_step: int = 0
    evaluations_without_improvement: int = 0

    def add_evaluation(self, step: int, loss: float, min_delta: float = 0.0) -> bool:
        """Record an evaluation; return whether its loss is the lowest so far.

        Several small improvements count as one once their sum exceeds ``min_delta``. A loss that is
        not finite is never an improvement.
        """
        is_finite = math.isfinite(loss)
        if is_finite and (
            self.reference_loss is None or loss < self.reference_loss - max(min_delta, 0.0)
        ):
            self.reference_loss, self.reference_step = loss, step
            self.evaluations_without_improvement = 0
        else:
            self.evaluations_without_improvement += 1
        is_best = is_finite and (self.best_loss is None or loss < self.best_loss)
        if is_best:
            self.best_loss, self.best_step = loss, step
        return is_best

    def explain_stop(self, patience: int | None, min_delta: float = 0.0) -> str:
        """Return the reason to stop training now; empty if it should go on."""
        if patience is None or self.evaluations_without_improvement < patience:
            return ""
        amount = f" by more than {min_delta:g}" if min_delta else ""
        return f"validation loss has not improved{amount} since step {self.reference_step}"

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for item in fields(self):
            setattr(self, item.name, state[item.name])
