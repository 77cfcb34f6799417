"""Decisions of early stopping and of the best checkpoint."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from flagscale.train.best_evaluation import EvaluationHistory


def evaluate(
    losses: list[float], min_delta: float = 0.0, **metric: Any
) -> tuple[EvaluationHistory, list[int]]:
    """Return the history after evaluations at steps 10, 20, …, and the steps that were the best."""
    history = EvaluationHistory(**metric)
    best = [
        step
        for step, loss in zip(range(10, 10000, 10), losses, strict=False)
        if history.add_evaluation(step, loss, min_delta)
    ]
    return history, best


@pytest.mark.parametrize(
    ("losses", "min_delta", "best", "since", "count"),
    [
        pytest.param([3.0], 0.0, [10], 10, 0, id="first"),
        pytest.param([3.0, 2.0, 1.0], 0.0, [10, 20, 30], 30, 0, id="falling"),
        pytest.param([3.0, 3.0, 3.5], 0.0, [10], 10, 2, id="equal-is-no-improvement"),
        pytest.param([3.0, 2.95, 2.9], 0.1, [10, 20, 30], 10, 2, id="small-improvements"),
        pytest.param([3.0, 2.95, 2.89], 0.1, [10, 20, 30], 30, 0, id="small-ones-add-up"),
        pytest.param([3.0, math.nan, math.inf, 2.0], 0.0, [10, 40], 40, 0, id="not-finite"),
        pytest.param([math.nan, math.nan], 0.0, [], 0, 2, id="never-finite"),
    ],
)
def test_best_evaluation_and_last_improvement(
    losses: list[float], min_delta: float, best: list[int], since: int, count: int
) -> None:
    history, best_steps = evaluate(losses, min_delta)
    assert best_steps == best
    assert (history.reference_step, history.evaluations_without_improvement) == (since, count)


def test_of_an_accuracy_the_highest_value_is_the_best() -> None:
    metric = {"metric": "arc/acc", "higher_is_better": True}
    history, best = evaluate([0.3, 0.25, 0.35, 0.36, math.nan], 0.02, **metric)
    assert best == [10, 30, 40]
    assert (history.best_value, history.reference_step) == (0.36, 30)
    assert history.explain_stop(2) == "arc/acc has not improved since step 30"


def test_history_of_an_older_checkpoint_is_one_of_validation_losses() -> None:
    history = EvaluationHistory()
    history.load_state_dict(
        {
            **{"best_loss": 2.0, "best_step": 20, "reference_loss": 2.5, "reference_step": 10},
            "evaluations_without_improvement": 1,
        }
    )
    assert history == EvaluationHistory(2.0, 20, 2.5, 10, 1)


@pytest.mark.parametrize(
    ("patience", "min_delta", "reason"),
    [
        (None, 0.0, ""),
        (3, 0.0, ""),
        (2, 0.0, "validation loss has not improved since step 10"),
        (1, 0.5, "validation loss has not improved by more than 0.5 since step 10"),
    ],
)
def test_reason_to_stop(patience: int | None, min_delta: float, reason: str) -> None:
    history, _ = evaluate([3.0, 3.1, 3.2])
    assert history.explain_stop(patience, min_delta) == reason


def test_a_resumed_run_decides_like_an_uninterrupted_one() -> None:
    losses = [3.0, 2.0, 2.5, 2.4, 2.3]
    uninterrupted, _ = evaluate(losses)
    first, _ = evaluate(losses[:3])
    resumed = EvaluationHistory()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step, loss in ((40, 2.4), (50, 2.3)):
        resumed.add_evaluation(step, loss)
    assert resumed == uninterrupted
