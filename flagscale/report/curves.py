"""Curves of runs over their steps, with events on the same axis."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flagscale.report.history import Attempt, step_of
from flagscale.report.plot import COLOURS, MARKS, Line, Mark, Plot
from flagscale.report.run import RunReport, make_labels

_POINTS = 60_000
"""Maximum number of points on a page, which browsers draw without delay."""
_MAX_OTHER_PLOTS = 24


class ReportedFigure(NamedTuple):
    """Figure reported in progress lines.

    ``factor`` converts it to the displayed unit. ``absent`` is the reason why a run may lack it.
    """

    name: str
    title: str
    unit: str
    factor: float = 1.0
    absent: str = "not reported"


FIGURES = (
    ReportedFigure("loss", "Loss", "nats"),
    ReportedFigure("grad_norm", "Gradient norm", "before clipping"),
    ReportedFigure("tokens_per_second", "Throughput", "tokens/s of the whole job"),
    ReportedFigure(
        "mfu", "MFU", "% of the device's peak", 100.0,
        "not known: a share of a peak that this device has none of (train.system.peak_tflops)",
    ),
    ReportedFigure("memory_gib", "Memory", "GiB, peak of the rank that reports", 1.0,
           "not counted on this device"),
    ReportedFigure("learning_rate", "Learning rate", ""),
)  # fmt: skip
_UNITS = {"step_seconds": "seconds", "tflops_per_gpu": "TFLOP/s of each device"}


def run_colour(index: int) -> int:
    """Return the palette index of a run."""
    return index % COLOURS


def main_plots(run_reports: Sequence[RunReport]) -> list[Plot]:
    """Return the main curves of these runs, one plot per figure."""
    return [
        plot
        for figure in FIGURES
        if (plot := _make_plot(figure, run_reports, marked=True)) is not None
    ]


def other_plots(run_reports: Sequence[RunReport]) -> list[Plot]:
    """Return the curves of all other figures in progress lines."""
    main_names = {figure.name for figure in FIGURES}
    names = dict.fromkeys(n for run in run_reports for a in run.attempts for n in a.figures)
    figures = [
        ReportedFigure(n, n.replace("_", " "), _UNITS.get(n, ""))
        for n in names
        if n not in main_names
    ]
    candidates = (_make_plot(one, run_reports, marked=False) for one in figures[:_MAX_OTHER_PLOTS])
    return [plot for plot in candidates if plot is not None]


def describe_missing_figures(run_reports: Sequence[RunReport]) -> list[str]:
    """Describe the figures that none of these runs has, with the reasons."""
    return [
        f"{figure.title}: {figure.absent}."
        for figure in FIGURES
        if not any(
            figure.name in attempt.figures for run in run_reports for attempt in run.attempts
        )
    ]


def _make_plot(
    figure: ReportedFigure, run_reports: Sequence[RunReport], *, marked: bool
) -> Plot | None:
    lines: list[Line] = []
    names = make_labels(run_reports) if len(run_reports) > 1 else [""]
    for index, (run, name) in enumerate(zip(run_reports, names, strict=True)):
        lines += _attempt_lines(figure, run, name or "training", run_colour(index))
        if figure.name == "loss":
            lines += _validation_lines(
                run, f"{name} validation".strip(), run_colour(index), len(run_reports) > 1
            )
    if not lines:
        return None
    step_bounds = [
        step for run in run_reports for attempt in run.attempts for step in _step_bounds(attempt)
    ]
    return Plot(
        figure.title,
        figure.unit,
        lines,
        marks=_event_marks(run_reports) if marked else (),
        x_range=(min(step_bounds), max(step_bounds)) if step_bounds else None,
        points=max(200, min(2000, _POINTS // (len(FIGURES) * len(lines)))),
        group="steps",
    )


def _step_bounds(attempt: Attempt) -> Iterator[int]:
    if attempt.steps:
        yield from (attempt.steps[0], attempt.steps[-1])
    yield from (step for event in attempt.of("evaluation") if (step := step_of(event)) is not None)


def _attempt_lines(figure: ReportedFigure, run: RunReport, label: str, of: int) -> Iterator[Line]:
    """Yield one or two lines per attempt; steps that a later attempt repeated are a faint line."""
    for attempt, until in _attempts_with_cut(run):
        values = attempt.figures.get(figure.name)
        if values is None:
            continue
        if figure.factor != 1.0:
            values = [value * figure.factor for value in values]
        cut = bisect_left(attempt.steps, until) if until is not None else len(attempt.steps)
        if cut:
            yield Line(label, attempt.steps[:cut], values[:cut], of)
        if cut < len(attempt.steps):
            again = f"{label} in attempt {attempt.number}"
            yield Line(again, attempt.steps[cut:], values[cut:], of, faint=True)


def _attempts_with_cut(run: RunReport) -> Iterator[tuple[Attempt, int | None]]:
    """Yield each attempt with the first step that a later one repeated, or None."""
    later: int | None = None
    turned: list[tuple[Attempt, int | None]] = []
    for attempt in reversed(run.attempts):
        turned.append((attempt, later))
        if attempt.steps:
            later = attempt.steps[0] if later is None else min(later, attempt.steps[0])
    return reversed(turned)


def _validation_lines(run: RunReport, label: str, of: int, several: bool) -> Iterator[Line]:
    """Yield one line per validation set."""
    losses_by_set: dict[str, dict[int, float]] = {}
    for event in (
        evaluation for attempt in run.attempts for evaluation in attempt.of("evaluation")
    ):
        step, loss = step_of(event), event.get("loss")
        if step is not None and type(loss) in (int, float):
            losses_by_set.setdefault(str(event.get("data", "")), {})[step] = float(loss)
    for number, (name, losses) in enumerate(losses_by_set.items(), start=1):
        steps = sorted(losses)
        line_colour = of if several else run_colour(of + number)
        values = [losses[step] for step in steps]
        yield Line(f"{label} {name}".strip(), steps, values, line_colour, dashed=True)


def _event_marks(run_reports: Sequence[RunReport]) -> list[Mark]:
    return [
        Mark(event.step, event.kind, f"step {event.step}: {event.text}", row)
        for row, run in enumerate(run_reports)
        for event in run.happened
        if event.kind in MARKS and event.step is not None
    ]
