"""Evaluations of a run by one metric: the best one, and when training stops for want of
improvement.

The metric is the validation loss, or a score on tasks (``best_metric``). No torch. The values are
equal on all ranks, and so are the decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

VALIDATION_LOSS = "validation loss"
_RENAMED = {"best_value": "best_loss", "reference_value": "reference_loss"}
"""Names in older checkpoints, whose metric was always the validation loss."""


@dataclass
class EvaluationHistory:
    """Evaluations of a run so far. Checkpoints contain it, so that a resumed run decides alike.

    Attributes:
        best_value: best value of the metric; None before the first evaluation.
        best_step: step of the best value.
        reference_value: value that an evaluation has to improve by ``early_stopping_min_delta``.
        reference_step: step of the last such improvement.
        evaluations_without_improvement: number of evaluations since then.
        metric: name of the metric.
        higher_is_better: whether a higher value of the metric is better.
    """

    best_value: float | None = None
    best_step: int = 0
    reference_value: float | None = None
    reference_step: int = 0
    evaluations_without_improvement: int = 0
    metric: str = VALIDATION_LOSS
    higher_is_better: bool = False

    def add_evaluation(self, step: int, value: float, min_delta: float = 0.0) -> bool:
        """Record an evaluation; return whether its value is the best so far.

        Several small improvements count as one once their sum exceeds ``min_delta``. A value that
        is not finite is never an improvement.
        """
        if self._is_better(value, self.reference_value, max(min_delta, 0.0)):
            self.reference_value, self.reference_step = value, step
            self.evaluations_without_improvement = 0
        else:
            self.evaluations_without_improvement += 1
        is_best = self._is_better(value, self.best_value)
        if is_best:
            self.best_value, self.best_step = value, step
        return is_best

    def _is_better(self, value: float, other: float | None, min_delta: float = 0.0) -> bool:
        if not math.isfinite(value):
            return False
        if other is None:
            return True
        if self.higher_is_better:
            return value > other + min_delta
        return value < other - min_delta

    def explain_stop(self, patience: int | None, min_delta: float = 0.0) -> str:
        """Return the reason to stop training now; empty if it should go on."""
        if patience is None or self.evaluations_without_improvement < patience:
            return ""
        amount = f" by more than {min_delta:g}" if min_delta else ""
        return f"{self.metric} has not improved{amount} since step {self.reference_step}"

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the history of a checkpoint. Older ones name no metric."""
        for item in fields(self):
            old_name = _RENAMED.get(item.name, item.name)
            setattr(self, item.name, state.get(item.name, state.get(old_name, item.default)))
