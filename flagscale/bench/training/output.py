"""What trials show and keep: tables on the terminal, JSON, CSV, figures and a page."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flagscale.bench.training.plan import Training
from flagscale.bench.training.results import SessionResult, Steps
from flagscale.bench.training.summary import (
    COLUMNS,
    FEW,
    Line,
    by_model,
    cells,
    findings,
    lines,
)
from flagscale.files import plain, write_atomic

_PUBLIC = 0o644
_WIDTH = 180


@dataclass(frozen=True)
class Outputs:
    """Files that are wanted."""

    json: Path | None = None
    csv: Path | None = None
    report: Path | None = None
    plots: tuple[Path, ...] = ()


def present(
    sessions: Sequence[SessionResult],
    training: Training,
    about: Mapping[str, Any],
    outputs: Outputs,
) -> None:
    """Show and write what sessions have found.

    Raises:
        OSError: a file cannot be written.
    """
    found = lines(sessions)
    # Where nobody looks, nothing is folded.
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(highlight=False, soft_wrap=True, width=width)
    console.print(guide_table(found))
    console.print(detail_table(found))
    for text in notes(sessions, found):
        console.print(Text(text))
    if outputs.json is not None:
        whole = as_json(sessions, training, about, found)
        write_atomic(outputs.json, json.dumps(whole, indent=1) + "\n", _PUBLIC)
    if outputs.csv is not None:
        write_atomic(outputs.csv, as_csv(sessions), _PUBLIC)
    if outputs.report is not None:
        from flagscale.bench.training.page import render

        write_atomic(outputs.report, render(sessions, found, training, about), _PUBLIC)
    for path in outputs.plots:
        from flagscale.bench.training.figures import write

        write(path, sessions, found)


def guide_table(found: Sequence[Line]) -> Table:
    """Seconds a step by model, setting and arm, the fastest arm of each row in bold."""
    table = Table(title="seconds a step (median), lower is better", box=box.SIMPLE_HEAD)
    arms = list(dict.fromkeys(line.arm for line in found))
    for heading in ("model", "setting"):
        table.add_column(heading)
    for arm in arms:
        table.add_column(arm, justify="right")
    rows: dict[tuple[str, str], dict[str, Line]] = {}
    for line in found:
        rows.setdefault((line.model, line.setting), {})[line.arm] = line
    shown = ""
    for (model, setting), own in rows.items():
        best = min(own.values(), key=lambda line: line.median)
        cells = [
            Text(f"{own[arm].median:.4g}", style="bold" if own[arm] is best else "") for arm in arms
        ]
        table.add_row(model if model != shown else "", setting, *cells)
        shown = model
    return table


def detail_table(found: Sequence[Line]) -> Table:
    """Everything that is said of each arm, in numbers."""
    table = Table(title="a step's parts", box=box.SIMPLE_HEAD)
    for number, heading in enumerate(COLUMNS):
        table.add_column(heading, justify="left" if number < 3 else "right")
    for line in found:
        table.add_row(*cells(line))
    return table


def notes(sessions: Sequence[SessionResult], found: Sequence[Line]) -> list[str]:
    """What was proved of each session, and what the numbers do not carry."""
    told = []
    for title, some in by_model(sessions):
        for session in some:
            told += [f"{title}, {session.setting}: {text}" for text in findings(session)]
    fewest = min(line.steps for line in found)
    if fewest < FEW:
        told.append(
            f"{fewest} steps an arm: a 99th percentile of fewer than {FEW} is little more than "
            "the slowest step"
        )
    return told


def as_json(
    sessions: Sequence[SessionResult],
    training: Training,
    about: Mapping[str, Any],
    found: Sequence[Line],
) -> dict[str, Any]:
    """The whole: how it was measured, what it says, and every step it says it from."""
    told = [
        {"model": s.model.name, "setting": s.setting, "findings": findings(s)} for s in sessions
    ]
    return {
        **about,
        "training": plain(training),
        "summary": plain(tuple(found)),
        "findings": told,
        "sessions": plain(tuple(sessions)),
    }


def _cells(values: Sequence[float], steps: Steps) -> Sequence[float | str]:
    """A column; an empty one where nobody tells."""
    return values or [""] * len(steps.step)


def as_csv(sessions: Sequence[SessionResult]) -> str:
    """A line a step that counts."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ("model", "setting", "arm", "round", "step", "seconds", "compute", "exposed", "summing")
    writer.writerow((*head, "loss"))
    for session in sessions:
        for one in session.arms:
            steps = one.steps
            told = (steps.compute, steps.exposed, steps.communication)
            parts = (steps.round, steps.step, steps.seconds, *(_cells(one, steps) for one in told))
            for row in zip(*parts, steps.loss, strict=True):
                writer.writerow((session.model.name, session.setting, one.arm.name, *row))
    return text.getvalue()
