"""Curves of a run's metrics over its steps, with events on the same axis; used by :mod:`.pages`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from flagscale.report.history import Attempt, step_of
from flagscale.report.plot import COLOURS, MARKS, Line, Mark, Plot
from flagscale.report.run import RunReport, make_labels

_MAX_PAGE_POINTS = 60_000
"""Maximum number of points on a page; browsers draw so many without delay."""
_MAX_OTHER_PLOTS = 24
_MAX_TASK_LINES = 24


class ReportedMetric(NamedTuple):
    """Metric reported in progress events.

    ``factor`` converts it to the displayed unit. ``missing_reason`` is the reason why a run may
    lack it.
    """

    name: str
    title: str
    unit: str
    factor: float = 1.0
    missing_reason: str = "not reported"


METRICS = (
    ReportedMetric("loss", "Loss", "nats"),
    ReportedMetric("grad_norm", "Gradient norm", "before clipping"),
    ReportedMetric("tokens_per_second", "Throughput", "tokens/s of the whole job"),
    ReportedMetric(
        "mfu", "MFU", "% of the device's peak", 100.0,
        "not known: a share of a peak that this device has none of (train.system.peak_tflops)",
    ),
    ReportedMetric("memory_gib", "Memory", "GiB, peak of the rank that reports", 1.0,
           "not counted on this device"),
    ReportedMetric("learning_rate", "Learning rate", ""),
)  # fmt: skip
_UNITS_BY_METRIC = {"step_seconds": "seconds", "tflops_per_gpu": "TFLOP/s of each device"}


def run_colour(index: int) -> int:
    """Return the palette index of a run."""
    return index % COLOURS


def main_plots(run_reports: Sequence[RunReport]) -> list[Plot]:
    """Return the plots of :data:`METRICS`, one per metric that a run has, and those of scores on
    tasks.
    """
    plots = [
        plot
        for metric in METRICS
        if (plot := _make_plot(metric, run_reports, has_marks=True)) is not None
    ]
    return [*plots, *_task_plots(run_reports)]


def _task_plots(run_reports: Sequence[RunReport]) -> list[Plot]:
    """Return one plot per metric of tasks, such as ``acc``, with a line per task and run."""
    names = make_labels(run_reports) if len(run_reports) > 1 else [""]
    lines_by_metric: dict[str, list[Line]] = {}
    for run, name in zip(run_reports, names, strict=True):
        for score, values in _collect_scores(run).items():
            task, _, metric = score.rpartition("/")
            lines = lines_by_metric.setdefault(metric, [])
            steps = sorted(values)
            scores = [values[step] for step in steps]
            lines.append(Line(f"{name} {task}".strip(), steps, scores, run_colour(len(lines))))
    return [
        Plot(f"Tasks: {metric}", "", lines[:_MAX_TASK_LINES], group="steps")
        for metric, lines in [*lines_by_metric.items()][:_MAX_OTHER_PLOTS]
    ]


def _collect_scores(run: RunReport) -> dict[str, dict[int, float]]:
    """Return the scores on tasks by name and step; of a repeated step, those of the last time."""
    scores: dict[str, dict[int, float]] = {}
    for attempt in run.attempts:
        for event in attempt.events_of_kind("tasks"):
            step = step_of(event)
            if step is None:
                continue
            for name, value in event.get_numbers("scores").items():
                scores.setdefault(name, {})[step] = float(value)
    return scores


def other_plots(run_reports: Sequence[RunReport]) -> list[Plot]:
    """Return the plots of all other metrics in progress events."""
    main_names = {metric.name for metric in METRICS}
    names = dict.fromkeys(n for run in run_reports for a in run.attempts for n in a.metrics)
    metrics = [
        ReportedMetric(n, n.replace("_", " "), _UNITS_BY_METRIC.get(n, ""))
        for n in names
        if n not in main_names
    ]
    candidates = (
        _make_plot(metric, run_reports, has_marks=False) for metric in metrics[:_MAX_OTHER_PLOTS]
    )
    return [plot for plot in candidates if plot is not None]


def describe_missing_metrics(run_reports: Sequence[RunReport]) -> list[str]:
    """Describe the metrics that none of these runs has, with the reasons."""
    return [
        f"{metric.title}: {metric.missing_reason}."
        for metric in METRICS
        if not any(
            metric.name in attempt.metrics for run in run_reports for attempt in run.attempts
        )
    ]


def _make_plot(
    metric: ReportedMetric, run_reports: Sequence[RunReport], *, has_marks: bool
) -> Plot | None:
    lines: list[Line] = []
    names = make_labels(run_reports) if len(run_reports) > 1 else [""]
    for index, (run, name) in enumerate(zip(run_reports, names, strict=True)):
        lines += _attempt_lines(metric, run, name or "training", run_colour(index))
        if metric.name == "loss":
            lines += _validation_lines(
                run, f"{name} validation".strip(), run_colour(index), len(run_reports) > 1
            )
    if not lines:
        return None
    step_bounds = [
        step for run in run_reports for attempt in run.attempts for step in _step_bounds(attempt)
    ]
    return Plot(
        metric.title,
        metric.unit,
        lines,
        marks=_event_marks(run_reports) if has_marks and len(run_reports) <= COLOURS else (),
        x_range=(min(step_bounds), max(step_bounds)) if step_bounds else None,
        max_points=max(200, min(2000, _MAX_PAGE_POINTS // (len(METRICS) * len(lines)))),
        group="steps",
    )


def _step_bounds(attempt: Attempt) -> Iterator[int]:
    if attempt.steps:
        yield from (attempt.steps[0], attempt.steps[-1])
    yield from (
        step
        for event in attempt.events_of_kind("evaluation", "tasks")
        if (step := step_of(event)) is not None
    )


def _attempt_lines(
    metric: ReportedMetric, run: RunReport, label: str, colour: int
) -> Iterator[Line]:
    """Yield one or two lines per attempt; steps that a later attempt repeated are a faint line."""
    for attempt, first_repeated_step in _attempts_with_repeated_step(run):
        values = attempt.metrics.get(metric.name)
        if values is None:
            continue
        if metric.factor != 1.0:
            values = [value * metric.factor for value in values]
        repeated_index = (
            bisect_left(attempt.steps, first_repeated_step)
            if first_repeated_step is not None
            else len(attempt.steps)
        )
        if repeated_index:
            yield Line(label, attempt.steps[:repeated_index], values[:repeated_index], colour)
        if repeated_index < len(attempt.steps):
            repeated_label = f"{label} in {attempt.label}"
            yield Line(
                repeated_label,
                attempt.steps[repeated_index:],
                values[repeated_index:],
                colour,
                faint=True,
            )


def _attempts_with_repeated_step(run: RunReport) -> Iterator[tuple[Attempt, int | None]]:
    """Yield each attempt with the first step that a later one repeated, or None."""
    first_repeated_step: int | None = None
    reversed_attempts: list[tuple[Attempt, int | None]] = []
    for attempt in reversed(run.attempts):
        reversed_attempts.append((attempt, first_repeated_step))
        if attempt.steps:
            first_repeated_step = (
                attempt.steps[0]
                if first_repeated_step is None
                else min(first_repeated_step, attempt.steps[0])
            )
    return reversed(reversed_attempts)


def _validation_lines(
    run: RunReport, label: str, colour: int, several_runs: bool
) -> Iterator[Line]:
    """Yield one line per validation set, and a faint one for the losses of repeated steps."""
    losses_by_set: dict[str, dict[int, float]] = {}
    replaced_losses: dict[tuple[str, str], dict[int, float]] = {}
    for attempt, first_repeated_step in _attempts_with_repeated_step(run):
        for event in attempt.events_of_kind("evaluation"):
            step, loss = step_of(event), event.get("loss")
            if step is None or type(loss) not in (int, float):
                continue
            name = str(event.get("data", ""))
            losses = losses_by_set.setdefault(name, {})
            if first_repeated_step is not None and step >= first_repeated_step:
                losses = replaced_losses.setdefault((name, attempt.label), {})
            losses[step] = float(loss)
    colours = {
        name: colour if several_runs else run_colour(colour + number)
        for number, name in enumerate(losses_by_set, start=1)
    }
    for name, losses in losses_by_set.items():
        if losses:
            yield _validation_line(f"{label} {name}".strip(), losses, colours[name])
    for (name, attempt_label), losses in replaced_losses.items():
        replaced_label = f"{label} {name}".strip() + f" in {attempt_label}"
        yield _validation_line(replaced_label, losses, colours[name], faint=True)


def _validation_line(
    label: str, losses: Mapping[int, float], colour: int, *, faint: bool = False
) -> Line:
    steps = sorted(losses)
    return Line(label, steps, [losses[step] for step in steps], colour, dashed=True, faint=faint)


def _event_marks(run_reports: Sequence[RunReport]) -> list[Mark]:
    return [
        Mark(event.step, event.kind, f"step {event.step}: {event.text}", row)
        for row, run in enumerate(run_reports)
        for event in run.timeline
        if event.kind in MARKS and event.step is not None
    ]
