"""The curves of runs over their steps, with what happened on their axis."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flagscale.report.history import Attempt, step_of
from flagscale.report.plot import COLOURS, MARKS, Line, Mark, Plot
from flagscale.report.run import Run, labels

_POINTS = 60_000
"""Of all curves of a page together: what a browser draws without a thought."""
_MOST_OTHERS = 24


class Figure(NamedTuple):
    """A figure of progress lines; ``times`` turns it into the unit that it is shown in, ``absent``
    says why a run may not have it."""

    name: str
    title: str
    unit: str
    times: float = 1.0
    absent: str = "not reported"


FIGURES = (
    Figure("loss", "Loss", "nats"),
    Figure("grad_norm", "Gradient norm", "before clipping"),
    Figure("tokens_per_second", "Throughput", "tokens/s of the whole job"),
    Figure(
        "mfu", "MFU", "% of the device's peak", 100.0,
        "not known: a share of a peak that this device has none of (train.system.peak_tflops)",
    ),
    Figure("memory_gib", "Memory", "GiB, peak of the rank that reports", 1.0,
           "not counted on this device"),
    Figure("learning_rate", "Learning rate", ""),
)  # fmt: skip
_UNITS = {"step_seconds": "seconds", "tflops_per_gpu": "TFLOP/s of each device"}


def colour(index: int) -> int:
    """Of the palette, that of a run."""
    return index % COLOURS


def plots(found: Sequence[Run]) -> list[Plot]:
    """The curves that these runs have, of one figure together."""
    return [plot for figure in FIGURES if (plot := _plot(figure, found, marked=True)) is not None]


def more(found: Sequence[Run]) -> list[Plot]:
    """The curves of all that progress lines tell beside that."""
    known = {figure.name for figure in FIGURES}
    names = dict.fromkeys(n for run in found for a in run.attempts for n in a.figures)
    others = [Figure(n, n.replace("_", " "), _UNITS.get(n, "")) for n in names if n not in known]
    made = (_plot(one, found, marked=False) for one in others[:_MOST_OTHERS])
    return [plot for plot in made if plot is not None]


def absent(found: Sequence[Run]) -> list[str]:
    """Which figures none of these runs has, and why."""
    return [
        f"{figure.title}: {figure.absent}."
        for figure in FIGURES
        if not any(figure.name in attempt.figures for run in found for attempt in run.attempts)
    ]


def _plot(figure: Figure, found: Sequence[Run], *, marked: bool) -> Plot | None:
    lines: list[Line] = []
    names = labels(found) if len(found) > 1 else [""]
    for index, (run, name) in enumerate(zip(found, names, strict=True)):
        lines += _lines(figure, run, name or "training", colour(index))
        if figure.name == "loss":
            lines += _validation(run, f"{name} validation".strip(), colour(index), len(found) > 1)
    if not lines:
        return None
    across = [step for run in found for attempt in run.attempts for step in _ends(attempt)]
    return Plot(
        figure.title,
        figure.unit,
        lines,
        marks=_marks(found) if marked else (),
        x_range=(min(across), max(across)) if across else None,
        points=max(200, min(2000, _POINTS // (len(FIGURES) * len(lines)))),
        group="steps",
    )


def _ends(attempt: Attempt) -> Iterator[int]:
    if attempt.steps:
        yield from (attempt.steps[0], attempt.steps[-1])
    yield from (step for event in attempt.of("evaluation") if (step := step_of(event)) is not None)


def _lines(figure: Figure, run: Run, label: str, of: int) -> Iterator[Line]:
    """A piece an attempt; what a later one did again is faint, and does not count any more."""
    for attempt, until in _until(run):
        values = attempt.figures.get(figure.name)
        if values is None:
            continue
        if figure.times != 1.0:
            values = [value * figure.times for value in values]
        cut = bisect_left(attempt.steps, until) if until is not None else len(attempt.steps)
        if cut:
            yield Line(label, attempt.steps[:cut], values[:cut], of)
        if cut < len(attempt.steps):
            again = f"{label} in attempt {attempt.number}"
            yield Line(again, attempt.steps[cut:], values[cut:], of, faint=True)


def _until(run: Run) -> Iterator[tuple[Attempt, int | None]]:
    """Each attempt, and from which step on a later one took its place, if one did."""
    later: int | None = None
    turned: list[tuple[Attempt, int | None]] = []
    for attempt in reversed(run.attempts):
        turned.append((attempt, later))
        if attempt.steps:
            later = attempt.steps[0] if later is None else min(later, attempt.steps[0])
    return reversed(turned)


def _validation(run: Run, label: str, of: int, several: bool) -> Iterator[Line]:
    """A line a validation set."""
    told: dict[str, dict[int, float]] = {}
    for event in (one for attempt in run.attempts for one in attempt.of("evaluation")):
        step, loss = step_of(event), event.get("loss")
        if step is not None and type(loss) in (int, float):
            told.setdefault(str(event.get("data", "")), {})[step] = float(loss)
    for number, (name, losses) in enumerate(told.items(), start=1):
        steps = sorted(losses)
        own = of if several else colour(of + number)
        values = [losses[step] for step in steps]
        yield Line(f"{label} {name}".strip(), steps, values, own, dashed=True)


def _marks(found: Sequence[Run]) -> list[Mark]:
    return [
        Mark(one.step, one.kind, f"step {one.step}: {one.text}", row)
        for row, run in enumerate(found)
        for one in run.happened
        if one.kind in MARKS and one.step is not None
    ]
