"""Scores of an evaluation on tasks, and the metric by which checkpoints are compared. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DEFAULT_FILTER = "none"


@dataclass(frozen=True)
class TaskScores:
    """Results of one evaluation.

    Attributes:
        values: metrics by name (:func:`score_name`).
        errors: standard errors of the metrics that have one, by the same names.
        seconds: duration of the evaluation.
    """

    values: Mapping[str, float]
    errors: Mapping[str, float]
    seconds: float


def score_name(task: str, metric: str, filter_name: str = _DEFAULT_FILTER) -> str:
    """Return the name of a metric of a task: ``task/metric``, or ``task/metric.filter``."""
    suffix = "" if filter_name == _DEFAULT_FILTER else f".{filter_name}"
    return f"{task}/{metric}{suffix}"


def read_results(results: Mapping[str, Any], seconds: float) -> TaskScores:
    """Return the scores in the results of lm_eval: of each task and of each group of tasks."""
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    for task, entries in {**results["results"], **results.get("groups", {})}.items():
        for key, value in entries.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            target = errors if metric.endswith("_stderr") else values
            name = score_name(task, metric.removesuffix("_stderr"), filter_name)
            target[name] = float(value)
    return TaskScores(values, errors, seconds)
